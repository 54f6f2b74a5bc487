"""What a text begins with: training, validation, questions and prompts by one rule, which ``data.bos`` overrules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from tests.cases import recipe
from tests.chats import TEMPLATES, save_tokenizer
from weft.cache import digest
from weft.checkpoint.run_state import Progress
from weft.data.bos import document_opening, with_bos
from weft.data.chat.source import open_chats
from weft.data.corpora import source_fingerprint
from weft.data.gguf_tokenizer import G, gguf_tokenizer
from weft.data.loader import open_data, tokenizer_of_data
from weft.data.tasks import plain_text
from weft.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_files
from weft.data.tokens import write_tokens
from weft.errors import UsageError
from weft.layout.mesh import Mesh
from weft.observe.run_metrics import read_metrics
from weft.recipe import Chat, Data, Source, build_recipe
from weft.train.runs import as_recorded
from weft.train.setup import Job, prepare
from weft.train.training import train_job

TEXTS = ["a b c", "c <bos> c b", "bb\na"]
BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"


def like_gemma(post: Any = None) -> Tokenizer:
    """Characters, and Gemma's special tokens; ``post``: a post-processor, by default Gemma's, which writes the BOS."""
    model = tokenizers.Tokenizer(
        tokenizers.models.BPE({chr(i): i for i in range(128)}, [])
    )
    model.add_special_tokens([PAD, EOS, BOS])
    ids = [(name, model.token_to_id(name)) for name in (BOS, EOS)]
    given = processors.TemplateProcessing(
        single=[BOS, "$A"], pair=[BOS, "$A", BOS, "$B:1"], special_tokens=ids
    )
    model.post_processor = given if post is None else post
    config = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    files = {
        "tokenizer.json": model.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    return tokenizer_from_files(files, "made here")


def test_bytes_of_a_command_line_that_are_no_text_are_question_marks() -> None:
    for tokenizer in (like_gemma(), load_tokenizer("bytes")):
        assert tokenizer.prompt_ids("a\udcff\udcfeé") == tokenizer.prompt_ids("a??é")


def templates(tokenizer: Tokenizer) -> dict[str, Any]:
    """Post-processors of published models, by what they are like."""
    model = tokenizer.model
    assert model is not None
    ids = [(name, model.token_to_id(name)) for name in (BOS, EOS)]
    begun = processors.TemplateProcessing(
        single=[BOS, "$A"], pair=[BOS, "$A", "$B:1"], special_tokens=ids[:1]
    )
    both = processors.TemplateProcessing(
        single=[BOS, "$A", EOS], pair=[BOS, "$A", EOS, "$B:1", EOS], special_tokens=ids
    )
    ended = processors.TemplateProcessing(
        single=["$A", EOS], pair=["$A", EOS, "$B:1", EOS], special_tokens=ids[1:]
    )
    level = processors.ByteLevel(trim_offsets=False)
    return {
        "gemma": begun, "llama3": processors.Sequence([level, begun]), "both": both, "t5": ended, "qwen": level,
        "bart": processors.RobertaProcessing(ids[1], ids[0]), "bert": processors.BertProcessing(ids[1], ids[0]),
        "ends, then begins": processors.Sequence([ended, begun]),
        "level, then ends": processors.Sequence([level, ended]),
    }  # fmt: skip


def documents_of(data: Data, own: Tokenizer) -> list[list[int]]:
    stream = open_data(data, own).train.streams[0]
    pairs = zip(stream.starts, stream.lengths, strict=True)
    return [stream.ids[at : at + length].tolist() for at, length in pairs]


def write_kind(kind: str, folder: Path) -> Source:
    if kind == "text":
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.txt").write_text(text)
        return Source(kind=kind, path=f"{folder}/*.txt")
    path = folder / f"texts.{kind}"
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return Source(kind=kind, path=str(path))


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
@pytest.mark.parametrize("bos", ["auto", True, False, "prompts"])
def test_documents_begin_as_prompts_do(tmp_path: Path, kind: str, bos: Any) -> None:
    """Case ``bos``: of a Gemma-like tokenizer each document has exactly one BOS, its first token."""
    data = Data(
        sources=(write_kind(kind, tmp_path),),
        bos=bos,
        validation=0,
        cache=tmp_path / "cache",
    )
    own = like_gemma()
    corpus = open_data(data, own)
    found = documents_of(data, own)
    prompts = [corpus.tokenizer.prompt_ids(text) for text in TEXTS]
    if bos == "prompts":
        assert [[own.bos, *ids] for ids in found] == [
            [*ids, own.eos] for ids in prompts
        ]
    else:
        assert found == [[*ids, own.eos] for ids in prompts]
    assert {ids.count(own.bos) for ids in found} == {int(bos in ("auto", True))}
    # What is saved, and exported, knows the rule.
    saved = tokenizer_from_files(corpus.tokenizer.files(), "saved")
    assert [saved.prompt_ids(text) for text in TEXTS] == prompts and saved.has_ids_of(
        own
    )
    first = corpus.train.row(0)
    if bos in ("auto", True):
        assert (
            first.tokens[first.starts] == own.bos
        ).all() and own.bos not in first.labels


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(templates(like_gemma()))), bos=st.sampled_from(["auto", True, False]),
    text=st.text(st.characters(max_codepoint=126, min_codepoint=32), max_size=12),
)  # fmt: skip
def test_any_post_processor_is_overruled(name: str, bos: Any, text: str) -> None:
    before = like_gemma(templates(like_gemma())[name])
    after = with_bos(before, bos)
    wanted = (
        [before.bos]
        if bos is True
        or (bos == "auto" and name not in ("t5", "qwen", "level, then ends"))
        else []
    )
    assert after.opening == wanted == document_opening(after, bos)
    assert after.model is not None and before.model is not None
    plain, whole = (
        after.encode(text).tolist(),
        after.model.encode(text, add_special_tokens=True).ids,
    )
    ends = before.model.encode("a", add_special_tokens=True).ids[-1:] == [before.eos]
    assert whole == [*wanted, *plain, *([before.eos] if ends else [])]
    assert plain == before.encode(text).tolist() and after.has_ids_of(before)
    assert (
        with_bos(after, bos) is after
        and tokenizer_from_files(after.files(), "it") == after
    )


def test_a_bos_that_there_is_not_is_refused(tmp_path: Path) -> None:
    for own in (
        load_tokenizer("bytes"),
        tokenizer_from_files({"tokenizer.json": nameless()}, "it"),
    ):
        with pytest.raises(
            UsageError,
            match=r"data\.bos = true, but the tokenizer has no token that begins a text",
        ):
            with_bos(own, True)
        assert with_bos(own, False) is own


def nameless() -> bytes:
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}))
    return model.to_str().encode()


@pytest.mark.parametrize("begins", [True, False])
def test_gguf_says_whether_a_text_begins_with_it(begins: bool) -> None:
    tokens = [*(chr(i) for i in range(33, 127)), EOS, BOS]
    fields = {
        f"{G}model": "gpt2", f"{G}pre": "gpt-2", f"{G}tokens": tokens, f"{G}merges": [], f"{G}add_bos_token": begins,
        f"{G}token_type": [1] * 94 + [3, 3], f"{G}eos_token_id": 94, f"{G}bos_token_id": 95,
    }  # fmt: skip
    own = tokenizer_from_files(gguf_tokenizer(fields), "it.gguf")
    assert own.opening == document_opening(own, "auto") == [95] * begins
    assert tokenizer_of_data(Data(bos=not begins), own).opening == [95] * (not begins)


def test_a_template_that_writes_it_is_the_only_one(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "llama3", TEMPLATES["llama3"])
    file = tmp_path / "talk.jsonl"
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    file.write_text(json.dumps({"messages": talk}) + "\n")
    for bos in (True, "auto", False):
        tokenizer = with_bos(load_tokenizer(str(folder)), bos)
        tokens = open_chats(
            Source(kind="chat", path=str(file)), Chat(), tokenizer, tmp_path / "cache"
        )
        assert (
            tokens.ids.tolist().count(tokenizer.bos) == 1
            and tokens.ids[0] == tokenizer.bos
        )


def test_questions_begin_as_documents_do() -> None:
    for bos, count in (("auto", 1), (False, 0)):
        tokenizer = with_bos(like_gemma(), bos)
        asked = plain_text("a b", " c", tokenizer)
        assert asked == (tokenizer.prompt_ids("a b"), tokenizer.encode(" c").tolist())
        assert asked[0].count(tokenizer.bos) == count


def test_tokens_made_elsewhere_are_looked_at(tmp_path: Path) -> None:
    own = like_gemma()
    for name, head in (("with", [own.bos]), ("without", [])):
        docs = [np.array([*head, 97, own.eos]) for _ in range(5)]
        write_tokens(tmp_path / name, docs, own.vocab, own.eos)
        corpus = open_data(
            Data(
                sources=(Source(kind="tokens", path=str(tmp_path / name)),),
                validation=0,
            ),
            own,
        )
        assert bool(corpus.notes) == (name == "without")
    assert "not all documents begin with <bos>, as prompts do" in corpus.notes[0]


def test_caches_of_before_are_for_runs_of_before(tmp_path: Path) -> None:
    source, own = write_kind("jsonl", tmp_path), like_gemma()
    data = Data(sources=(source,), cache=tmp_path / "cache")
    open_data(data.model_copy(update={"bos": "prompts"}), own)
    (old,) = (tmp_path / "cache").glob("tokens-*")
    assert (
        old.name == f"tokens-{digest(1, source_fingerprint(source), own.fingerprint)}"
    )
    open_data(data, own)
    assert len(list((tmp_path / "cache").glob("tokens-*"))) == 2


@pytest.mark.slow(4)
def test_a_run_of_before_keeps_its_data_and_its_warmup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint without ``data.bos`` in its recipe goes on as it began: same losses and rates as uninterrupted."""
    like_gemma().save(tmp_path / "tokenizer")
    source = write_kind("jsonl", tmp_path)
    change: dict[str, Any] = {
        "data__tokenizer": str(tmp_path / "tokenizer"),
        "data__validation": 0.0,
    }
    change |= {
        "train__dtype": "float32",
        "train__steps": 4,
        "checkpoint__every": 2,
        "checkpoint__keep": 9,
    }
    then = recipe(
        str(source.path), **change, data__bos="prompts", optimizer__warmup=100
    )
    now = build_recipe(
        recipe(str(source.path), **change, optimizer__warmup=None).model_dump(
            mode="json"
        )
    )
    facts = Job.facts

    def of_before(job: Job, progress: Progress) -> dict[str, Any]:
        found = facts(job, progress)
        del found["recipe"]["data"]["bos"]
        return found

    out = tmp_path / "run"
    with mock.patch.object(Job, "facts", of_before):
        train_job(prepare(then), Mesh.single(), out)
    whole = [(r["loss"], r["lr"]) for r in read_metrics(out)["train"]]
    capsys.readouterr()
    at = str(out / "checkpoints/step-000002")
    for _ in range(2):  # and once more, from what the resumed run has recorded
        kept = as_recorded(now, out, at)
        assert (kept.data.bos, kept.optimizer.warmup) == ("prompts", 100)
        train_job(prepare(kept), Mesh.single(), out, at)
        assert [(r["loss"], r["lr"]) for r in read_metrics(out)["train"]] == whole
        said = capsys.readouterr().out
        assert (
            "documents go on without <bos>, as the run began" in said
            and "resumed with" not in said
        )
        at = "auto"
    asked = now.model_copy(update={"data": now.data.model_copy(update={"bos": True})})
    assert as_recorded(asked, out, at).data.bos is True
