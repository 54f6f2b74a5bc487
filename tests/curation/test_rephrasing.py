"""Rephrased documents: nothing is written twice, and each text depends on its document and the settings alone."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.running import Running, build
from weft.curation.data_operators import OperatorFailed
from weft.curation.data_pipeline import DataStep
from weft.curation.data_run import run_pipeline
from weft.curation.documents import Documents
from weft.curation.engine_generator import EngineGenerator
from weft.curation.passages import cut_document, without_half_sentence, word_count
from weft.curation.read_pipeline import build_pipeline
from weft.curation.rephrase_styles import STYLES, prompts_of_styles
from weft.curation.text_generator import (
    CopyGenerator,
    PromptToWrite,
    WritingSettings,
    WrittenText,
)
from weft.curation.text_store import TextStore
from weft.data.corpora import read_documents, source_fingerprint
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError, WeftError
from weft.models.hugging_face import export
from weft.parallel.build import resident_state
from weft.recipe import Source

BYTES = load_tokenizer("bytes")
#: A template such as models that reason have, which also says the date.
TEMPLATE = (
    "{{ strftime_now('%Y') }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model with random weights, which chats."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny = build()
    held = resident_state(tiny, tiny.mesh).held
    export({p.name: p.local for p in held}, tiny.shape, folder)
    replace(BYTES, chat_template=TEMPLATE).save(folder)
    return str(folder)


def step(tmp_path: Path, **settings: Any) -> Any:
    """The operator, with texts kept in a folder of the test's."""
    values = {"operator": "rephrase", "cache": str(tmp_path / "kept")} | settings
    return DataStep(**values).build()


def documents(*texts: str) -> Documents:
    names = [f"d{number}" for number in range(len(texts))]
    return Documents(names, list(texts), {"page": list(range(len(texts)))})


class Upper:
    """A generator that counts what it writes, refuses some passages, and may be killed."""

    def __init__(self, dies_after: int = -1) -> None:
        self.asked, self.dies_after = list[str](), dies_after

    def digest(self) -> str:
        return "upper"

    def count(self, text: str) -> int:
        return word_count(text)

    def write(
        self, prompts: Iterable[PromptToWrite], settings: WritingSettings
    ) -> Iterator[WrittenText]:
        for prompt in prompts:
            if len(self.asked) == self.dies_after:
                raise KeyboardInterrupt
            self.asked.append(prompt.prompt)
            if "refused" in prompt.passage:
                yield WrittenText(prompt.number, "", failed="too rude")
            elif "silent" in prompt.passage:
                yield WrittenText(prompt.number, " \n")
            else:
                yield WrittenText(prompt.number, f"{prompt.passage.upper()} ")


def with_generator(tmp_path: Path, generator: Any, **settings: Any) -> Any:
    operator = step(tmp_path, model="copy", **settings)
    operator.generator = generator
    return operator


@given(st.text(st.sampled_from("ab.!? \n\t。…\"'é𝄞"), max_size=120), st.integers(1, 9))
def test_passages_joined_are_the_document(text: str, most: int) -> None:
    whole = cut_document(text, most, len)
    texts = [passage.text for passage in whole.passages]
    assert whole.join(texts) == text
    assert all(0 < len(each) <= most and each == each.strip() for each in texts)


def test_passages_end_with_sentences_and_are_as_long_as_they_may_be() -> None:
    text = "One two three. Four five! \n\nSix seven? Eight nine ten eleven twelve."
    cut = cut_document(text, 8, word_count).passages
    assert [passage.text for passage in cut] == [
        "One two three. Four five!",
        "Six seven?",
        "Eight nine ten eleven twelve.",
    ]
    assert [passage.gap for passage in cut] == [" \n\n", " ", ""]
    assert without_half_sentence('He said "yes." And th') == 'He said "yes."'
    assert without_half_sentence("no end") == "no end"


def test_copying_is_reading_every_document_twice(tmp_path: Path) -> None:
    texts = ("One. " * 500, "Two lines\n\n of 文。字", "  three ")
    given_ones = documents(*texts)
    result = step(tmp_path, model="copy", passage=16).map(given_ones)
    assert Counter(result.texts) == Counter(2 * texts)
    sources = [name for each in given_ones.ids for name in ("", each)]
    assert result.columns["rephrased_from"] == sources
    assert result.columns["rephrase_style"] == ["", "wikipedia"] * 3
    assert result.columns["page"] == [0, 0, 1, 1, 2, 2]
    assert len(set(result.ids)) == len(result.ids)
    alone = step(tmp_path, model="copy", passage=16, keep=False).map(given_ones)
    assert alone.texts == list(texts)


def test_every_style_is_asked_for_every_passage_and_failures_are_named(
    tmp_path: Path,
) -> None:
    own = tmp_path / "own.txt"
    own.write_text("As a poem: {text}")
    generator = Upper()
    operator = with_generator(
        tmp_path,
        generator,
        styles=("terse", "poem"),
        prompts={"poem": str(own)},
        passage=16,
    )
    long = (
        "A refused word. " + "And many other words that make another passage here. " * 2
    )
    result = operator.map(documents("Fine.", long, "silent", " "))
    poem = [
        t
        for t, s in zip(result.texts, result.columns["rephrase_style"], strict=True)
        if s
    ]
    assert poem == ["FINE.", "FINE."]
    assert "As a poem: Fine." in generator.asked
    assert STYLES["terse"].replace("{text}", "Fine.") in generator.asked
    assert [(f.id, f.style, f.reason) for f in operator.failures] == [
        ("d1", "terse", "passage 1 of 2: too rude"),
        ("d1", "poem", "passage 1 of 2: too rude"),
        ("d2", "terse", "nothing was written"),
        ("d2", "poem", "nothing was written"),
        ("d3", "terse", "no text"),
        ("d3", "poem", "no text"),
    ]
    failed = dict(zip(result.ids, result.columns["rephrase_failed"], strict=True))
    assert failed["d0"] == ""
    assert failed["d2"] == "terse: nothing was written; poem: nothing was written"
    # a second generator adds its own, and leaves the first one's alone
    again = with_generator(tmp_path, CopyGenerator(), styles=("terse",)).map(result)
    assert len(again) == len(result) + 3 and len(set(again.ids)) == len(again)


@pytest.mark.parametrize("dies_after", range(1, 6))
def test_after_a_kill_nothing_is_written_twice(tmp_path: Path, dies_after: int) -> None:
    texts = documents("One.", "Two.", "One.", "Three.")
    dying = Upper(dies_after)
    styles = {"styles": ("terse", "simple")}
    with pytest.raises(KeyboardInterrupt):
        with_generator(tmp_path, dying, **styles).map(texts)
    second = Upper()
    result = with_generator(tmp_path, second, **styles).map(texts)
    asked = [*dying.asked, *second.asked]
    assert len(asked) == len(set(asked)) == 6 and len(dying.asked) == dies_after
    whole = with_generator(tmp_path / "new", Upper(), **styles).map(texts)
    assert whole == result


def test_what_a_text_depends_on_decides_whether_it_is_written_again(
    tmp_path: Path,
) -> None:
    def asked(**settings: Any) -> int:
        generator = Upper()
        with_generator(tmp_path, generator, **settings).map(documents("One."))
        return len(generator.asked)

    assert asked() == 1
    assert asked() == asked(keep=False) == asked(requests=3) == 0
    assert asked(seed=1) == 0, "the likeliest tokens have no seed"
    assert asked(tokens=7) == asked(temperature=0.5) == 1
    assert asked(temperature=0.5, seed=1) == 1
    assert asked(styles=("poem",), prompts={"poem": "A poem: {text}"}) == 1
    assert asked(styles=("poem",), prompts={"poem": "A sonnet: {text}"}) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_does_not_depend_on_what_is_written_beside_it(
    model: str, tmp_path: Path, temperature: float
) -> None:
    texts = [f"Document {i}. " * (1 + i % 3) for i in range(5)]
    settings = {
        "model": model,
        "tokens": 12,
        "passage": 20,
        "temperature": temperature,
        "styles": ("terse", "own"),
        "prompts": {"own": "{text}"},
    }
    together = step(tmp_path / "a", requests=7, **settings).map(documents(*texts))
    parts = [
        step(tmp_path / f"b{i}", requests=1 + i, **settings).map(
            documents(*texts).select([i])
        )
        for i in reversed(range(5))
    ]
    apart = {n: t for part in parts for n, t in zip(part.ids, part.texts, strict=True)}
    assert dict(zip(together.ids, together.texts, strict=True)) == apart
    assert len(together) == 15 and any(together.columns["rephrase_cut"])


def test_a_prompt_that_is_too_long_is_named_and_the_model_is_asked_by_its_template(
    model: str, tmp_path: Path
) -> None:
    operator = step(
        tmp_path,
        model=model,
        tokens=4,
        passage=5000,
        styles=("own",),
        prompts={"own": "{text}"},
        requests=1,
    )
    generator = operator.generator
    assert isinstance(generator, EngineGenerator)
    said = BYTES.decode(generator._ids("Hello"))
    assert said == "2025<user>Hello<assistant>"
    generator.capacity = 50
    operator.map(documents("Long. " * 20, "Short."))
    assert [f.id for f in operator.failures] == ["d0"]
    assert "are more than 50" in operator.failures[0].reason
    assert operator.written == 1
    assert len(operator.fingerprint()) == 24


def test_a_server_writes_what_its_model_writes(model: str, tmp_path: Path) -> None:
    server = Running(replace(BYTES, chat_template=TEMPLATE.replace("{{ strftime_now('%Y') }}", "2025")))  # fmt: skip
    settings: dict[str, Any] = {"tokens": 8, "styles": ("simple", "terse")}
    try:
        url = f"http://127.0.0.1:{server.address[1]}"
        served = step(tmp_path / "a", model=f"{url}/v1", requests=3, **settings)
        texts = documents("One.", "Two words.")
        result = served.map(texts)
        assert served.generator.digest() != step(tmp_path, model=url, served="x").generator.digest()  # fmt: skip
    finally:
        server.close()
    here = step(tmp_path / "b", model=model, **settings).map(texts)
    assert result.texts == here.texts and len(result) == 6


@contextmanager
def answering(*replies: tuple[int, dict[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """A server that gives these replies, the last again and again, and the bodies of what it was asked."""
    asked = list[Any]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            code, reply = replies[min(len(asked), len(replies) - 1)]
            asked.append(json.loads(body))
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *line: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def chosen(text: str, why: str = "stop") -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}, "finish_reason": why}]}


def refusal(line: str) -> dict[str, Any]:
    return {"error": {"message": line}}


def test_a_busy_server_is_asked_again_and_a_refused_prompt_is_named(
    tmp_path: Path,
) -> None:
    replies = ((503, refusal("busy")), (200, chosen("First. Sec", "length")), (400, refusal("too long")))  # fmt: skip
    with answering(*replies) as (url, asked):
        operator = step(tmp_path, model=url, served="m", requests=1, temperature=0.5)
        result = operator.map(documents("One.", "Two."))
    assert asked[0] == asked[1] and asked[0]["model"] == "m"
    assert 0 <= asked[0]["seed"] < 2**31 and asked[0]["seed"] != asked[2]["seed"]
    assert result.texts == ["One.", "First.", "Two."]
    assert result.columns["rephrase_cut"] == [0, 1, 0]
    assert [(f.id, f.reason) for f in operator.failures] == [
        ("d1", f"{url} refuses (400): too long")
    ]


@pytest.mark.parametrize(
    ("reply", "line"),
    [
        ((401, refusal("no key")), "refuses (401): no key"),
        ((200, {}), "answers without a text"),
        ((429, refusal("slowly")), "refuses (429): slowly"),
    ],
)
def test_a_server_that_cannot_be_used_ends_the_step(
    tmp_path: Path, reply: tuple[int, dict[str, Any]], line: str
) -> None:
    with answering(reply) as (url, _), pytest.raises(OperatorFailed, match="127") as error:  # fmt: skip
        step(tmp_path, model=url, served="m", patience=0.1).map(documents("One."))
    assert line in str(error.value)


def test_what_cannot_be_asked_for_is_refused(tmp_path: Path) -> None:
    for settings, line in (
        ({"model": ""}, "needs model"),
        ({"styles": ()}, "styles is empty"),
        ({"styles": ("tense",)}, "did you mean 'terse'"),
        ({"styles": ("terse", "terse")}, "stands twice"),
        ({"prompts": {"poem": "{text}"}}, "is not used"),
        ({"styles": ("a",), "prompts": {"a": "no place"}}, "has no {text}"),
        ({"styles": ("A b",), "prompts": {"A b": "{text}"}}, "no name for ids"),
    ):
        with pytest.raises(UsageError, match=line.replace("{", r"\{")):
            step(tmp_path, **{"model": "copy"} | settings)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "texts.sqlite").write_text("no data base" * 100)
    with pytest.raises(OperatorFailed, match="remove the file if it is damaged"):
        step(tmp_path, model="copy").map(documents("One."))
    assert set(prompts_of_styles([*STYLES], {})) == set(STYLES)
    with pytest.raises(
        UsageError, match=r"has no \{text\} where the passage goes, and is no file"
    ):
        prompts_of_styles(["long"], {"long": "Say it again, but in verse. " * 10})


def test_texts_outlive_a_kill_and_processes_write_side_by_side(tmp_path: Path) -> None:
    children = list[int]()
    for number in range(2):
        if not (child := os.fork()):
            try:
                store = TextStore(tmp_path / "kept")
                for i in range(50):
                    store.put(f"{number} {i}".encode(), f"text {i}", False)
                    store.put(b"same", "text", True)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    keys = [f"{number} {i}".encode() for number in range(2) for i in range(50)]
    kept = TextStore(tmp_path / "kept").get([b"same", b"none", *keys])
    assert kept.pop(b"same") == ("text", True)
    assert len(kept) == 100
    assert all(kept[key].text == f"text {key.decode()[2:]}" for key in keys)


PIPELINE: dict[str, Any] = {
    "sources": [{"kind": "jsonl", "path": "data.jsonl"}],
    "steps": [
        {"operator": "rephrase", "model": "copy", "styles": ["terse", "simple"]},
        {"operator": "pair"},
    ],
    "output": {"format": "jsonl"},
}


def test_a_run_of_a_pipeline_pairs_what_it_writes_and_training_reads_each_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    texts = [f"Text number {i}." for i in range(30)]
    lines = [json.dumps({"text": text, "id": "x"}) for text in texts]
    Path("data.jsonl").write_text("\n".join(lines))
    done = run_pipeline(build_pipeline(PIPELINE | {"shards": 3}), "out", 0)
    assert done.documents == 60 and not done.notes
    for part in ("real", "synthetic"):
        for kind, at in (("jsonl", "out/documents"), ("parquet", "again/documents")):
            if kind == "parquet":
                more = {"output": {"format": "parquet"}, "shards": 1}
                run_pipeline(build_pipeline(PIPELINE | more), "again", 0)
            source = Source(kind=kind, path=at, where={"part": part})
            assert sorted(read_documents(source)) == sorted(texts)
    both = Source(kind="jsonl", path="out/documents")
    assert Counter(read_documents(both)) == Counter(2 * texts)
    assert source_fingerprint(both) != source_fingerprint(
        both.model_copy(update={"where": {"part": "real"}})
    )
    unknown = Source(kind="parquet", path="again/documents", where={"parts": "real"})
    with pytest.raises(WeftError, match="set the source's 'where', did you mean 'part"):
        list(read_documents(unknown))
    with pytest.raises(UsageError, match="where is of kinds 'jsonl' and 'parquet'"):
        Source(kind="text", path="out", where={"part": "real"})


def test_a_run_names_what_could_not_be_written_and_ends_without_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    Path("data.jsonl").write_text('{"text": "One."}\n{"text": " "}\n{"text": "Two."}')
    step = {"operator": "rephrase", "model": "copy"}
    tree = PIPELINE | {"steps": [step]}
    for _ in range(2):  # also when nothing is left to do
        done = run_pipeline(build_pipeline(tree), "out", 0)
        assert done.documents == 5
        assert done.notes == (
            "steps[0] (rephrase): 1 documents could not be made; the first: from "
            "data.jsonl:data.jsonl#2: wikipedia: no text",
        )
    gone = step | {"model": "http://127.0.0.1:9", "served": "m", "patience": 0}
    with pytest.raises(
        WeftError, match=r"steps\[0\] \(rephrase\): http://127.0.0.1:9 ca"
    ):
        run_pipeline(build_pipeline(PIPELINE | {"steps": [gone]}), "out", 0)
