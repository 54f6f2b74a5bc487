"""Tokenizers and the token cache."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from weft.cache import cache_root
from weft.data import tokens as tokens_module
from weft.data.corpora import read_documents
from weft.data.loader import open_data
from weft.data.placed_text import PlacedText
from weft.data.tokenizer import Tokenizer, load_tokenizer, sample_text
from weft.data.tokens import open_source, read_tokens, write_tokens
from weft.errors import UsageError, WeftError
from weft.recipe import Data, Source

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "naïve €uro 🙂",
    "for i in range(10): print(i)\n" * 20,
]


@pytest.fixture
def corpus(tmp_path: Path) -> Source:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i, text in enumerate(TEXTS):
        (folder / f"{i}.txt").write_text(text)
    return Source(kind="text", path=str(folder))


@pytest.mark.slow
@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64 and (tokenizer.vocab, tokenizer.eos) == (257, 256)
    assert tokenizer.decode(np.append(ids, tokenizer.eos)) == text


@pytest.mark.parametrize("spec", ["bytes", "train:300"])
def test_a_saved_tokenizer_is_the_same_tokenizer(
    tmp_path: Path, corpus: Source, spec: str
) -> None:
    tokenizer = load_tokenizer(spec, [corpus], tmp_path / "cache")
    tokenizer.save(tmp_path / "run")
    again = load_tokenizer(str(tmp_path / "run"))
    assert again == tokenizer
    assert again == load_tokenizer(str(tmp_path / "run" / "tokenizer.json"))
    for text in TEXTS:
        assert again.decode(again.encode(text)) == text


def test_trained_tokenizer_is_deterministic_compresses_and_is_cached(
    tmp_path: Path, corpus: Source
) -> None:
    first = load_tokenizer("train:300", [corpus], tmp_path / "a")
    assert first == load_tokenizer("train:300", [corpus], tmp_path / "b")
    assert first.vocab == 300 and len(first.encode(TEXTS[2])) < len(TEXTS[2]) / 2
    (model,) = (tmp_path / "a").glob("tokenizer-*/tokenizer.json")
    before = model.stat().st_mtime_ns
    load_tokenizer("train:300", [corpus], tmp_path / "a")
    assert model.stat().st_mtime_ns == before


def test_special_tokens_in_a_document_are_text(tmp_path: Path, corpus: Source) -> None:
    tokenizer = load_tokenizer("train:300", [corpus], tmp_path)
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.eos not in ids and tokenizer.decode(ids) == "a<|endoftext|>b"


def model(folder: Path, *special: str) -> str:
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(list(special))
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_eos_is_configured_or_one_of_the_common_names(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", "<stop>", "</s>")
    assert load_tokenizer(folder).eos == 3
    for named in ("<stop>", {"content": "<stop>"}):
        (tmp_path / "m" / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": named})
        )
        tokenizer = load_tokenizer(folder)
        assert (tokenizer.eos, tokenizer.vocab) == (2, 4)
    tokenizer.save(tmp_path / "run")
    assert load_tokenizer(str(tmp_path / "run")) == tokenizer
    with pytest.raises(WeftError, match="eos_token"):
        _ = load_tokenizer(model(tmp_path / "none")).closing


def test_special_tokens_and_the_chat_template_come_along(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", "<s>", "</s>", "<|user|>")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.specials == {"<s>": 2, "</s>": 3, "<|user|>": 4}
    assert tokenizer.encode("a<|user|>a", special=True).tolist() == [0, 4, 0]
    assert 4 not in tokenizer.encode("a<|user|>a") and 4 in tokenizer.encode(
        "<|user|>", special=True
    )
    assert (tokenizer.bos, tokenizer.pad, tokenizer.chat_template) == (None, None, None)
    config = tmp_path / "m" / "tokenizer_config.json"
    named = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "listed"},
    ]
    for template in ("given", named):
        config.write_text(
            json.dumps(
                {
                    "bos_token": "<s>",
                    "pad_token": {"content": "</s>"},
                    "chat_template": template,
                }
            )
        )
        tokenizer = load_tokenizer(folder)
        assert (tokenizer.bos, tokenizer.pad) == (2, 3)
        assert tokenizer.chat_template == ("given" if template == "given" else "listed")
    (tmp_path / "m" / "chat_template.jinja").write_text("of its own\n")
    tokenizer = load_tokenizer(folder)
    tokenizer.save(tmp_path / "run")
    again = load_tokenizer(str(tmp_path / "run"))
    assert again == tokenizer and again.chat_template == "of its own\n"
    plain = dataclasses.replace(load_tokenizer("bytes"), chat_template="{{ messages }}")
    plain.save(tmp_path / "bytes")
    assert load_tokenizer(str(tmp_path / "bytes")).chat_template == "{{ messages }}"
    assert plain.encode("a<|endoftext|>", special=True).tolist() == [97, plain.eos]


def test_transformers_reads_a_saved_tokenizer(tmp_path: Path, corpus: Source) -> None:
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer("train:300", [corpus], tmp_path / "cache")
    tokenizer.save(tmp_path / "run")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "run")
    assert theirs.eos_token_id == tokenizer.eos
    assert theirs(TEXTS[0])["input_ids"] == tokenizer.encode(TEXTS[0]).tolist()


@pytest.mark.parametrize(
    "spec", ["train:12", "train:many", "nowhere/tokenizer.json", "damaged"]
)
def test_tokenizer_mistakes_are_one_line(
    tmp_path: Path, corpus: Source, spec: str
) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(WeftError) as error:
        load_tokenizer(
            str(tmp_path / spec) if spec == "damaged" else spec, [corpus], tmp_path
        )
    assert "\n" not in str(error.value) and spec.split("/")[0] in str(error.value)
    assert isinstance(error.value, UsageError) == spec.startswith("train")


def test_the_training_sample_is_bounded_and_spread_out(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(
        "".join(
            json.dumps({"text": chr(0x4E00 + i) * 20_000}) + "\n" for i in range(100)
        )
    )
    source = Source(kind="jsonl", path=str(file))
    pieces = sample_text([source], 200_000)
    assert 90_000 < sum(map(len, pieces)) <= 200_000
    seen = [ord(piece[0]) - 0x4E00 for piece in pieces]
    assert seen[0] == 0 and seen[-1] > 90 and set(np.diff(seen)) <= {5, 6}
    assert sample_text([source], 10**9) == [
        text[i : i + 8192]
        for text in read_documents(source)
        for i in range(0, 20_000, 8192)
    ]


def test_token_folder_round_trip(tmp_path: Path) -> None:
    docs = [
        np.array([1, 2, 3]),
        np.array([], int),
        np.array([4, 9]),
        np.array([9]),
        np.array([5]),
    ]
    write_tokens(tmp_path / "t", iter(docs), vocab=10, eos=9)
    read = read_tokens(tmp_path / "t")
    assert read.ids.dtype == np.uint16 and read.ids.tolist() == [1, 2, 3, 9, 4, 9, 5, 9]
    assert read.offsets.tolist() == [0, 4, 6, 8] and (read.vocab, read.eos) == (10, 9)
    meta = json.loads((tmp_path / "t" / "meta.json").read_text())
    assert (meta["dtype"], meta["vocab"], meta["eos"], meta["count"]) == (
        "uint16",
        10,
        9,
        8,
    )
    write_tokens(tmp_path / "wide", [np.array([70_000])], vocab=2**16 + 5000, eos=0)
    assert read_tokens(tmp_path / "wide").ids.dtype == np.uint32
    for docs, words in (
        ([np.array([10])], "outside 0..9"),
        ([np.array([-1])], "outside"),
        ([], "no document"),
    ):
        with pytest.raises(WeftError, match=words):
            write_tokens(tmp_path / "bad", docs, vocab=10, eos=9)
        assert not (tmp_path / "bad").exists()
    with pytest.raises(WeftError, match="exists already"):
        write_tokens(tmp_path / "t", docs, vocab=10, eos=9)


def test_bare_binary_with_offsets_beside_it(tmp_path: Path) -> None:
    np.array([7, 8, 256, 9, 256], "<u4").tofile(tmp_path / "x.bin")
    source = Source(kind="tokens", path=str(tmp_path / "x.bin"))
    with pytest.raises(WeftError, match="offsets"):
        open_source(source, load_tokenizer("bytes"))
    np.save(tmp_path / "x.offsets.npy", np.array([0, 3, 5]))
    tokens = open_source(source, load_tokenizer("bytes"))
    assert tokens.ids.tolist() == [7, 8, 256, 9, 256] and tokens.vocab is None
    with pytest.raises(WeftError, match="tokenizer"):
        open_source(source, Tokenizer(256, 255, "small"))


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t", [np.array([1, 2])], vocab=1000, eos=0)
    with pytest.raises(WeftError, match=r"set data\.tokenizer"):
        open_source(
            Source(kind="tokens", path=str(tmp_path / "t")), load_tokenizer("bytes")
        )


def test_damaged_token_files_are_named(tmp_path: Path) -> None:
    for name, content in (
        ("tokens.bin", b"123"),
        ("offsets.npy", b"\x93NUMPY"),
        ("meta.json", b"{"),
        ("meta.json", b"[1]"),
        ("meta.json", None),
        ("tokens.bin", None),
    ):
        folder = tmp_path / f"{name}{content!r}"
        write_tokens(folder, [np.array([1, 2, 3])], vocab=10, eos=9)
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        with pytest.raises(WeftError, match=name) as error:
            read_tokens(folder)
        assert "\n" not in str(error.value)


def test_cache_is_used_and_renewed(
    tmp_path: Path, corpus: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer("bytes")
    built: list[Source] = []
    real = tokens_module.placed_documents

    def counted(source: Source, report: Any = None) -> Iterator[PlacedText]:
        built.append(source)
        return real(source, report)

    monkeypatch.setattr(tokens_module, "placed_documents", counted)
    first = open_source(corpus, tokenizer, tmp_path / "cache")
    spans = zip(first.offsets[:-1], first.offsets[1:] - 1, strict=True)
    assert [tokenizer.decode(first.ids[lo:hi]) for lo, hi in spans] == TEXTS
    assert (first.ids[first.offsets[1:] - 1] == tokenizer.eos).all()
    assert (
        open_source(corpus, tokenizer, tmp_path / "cache").fingerprint
        == first.fingerprint
        and len(built) == 1
    )
    (Path(corpus.path or "") / "0.txt").write_text("changed")
    assert (
        open_source(corpus, tokenizer, tmp_path / "cache").fingerprint
        != first.fingerprint
        and len(built) == 2
    )
    (folder, _) = (tmp_path / "cache").glob("tokens-*")
    # the cache says itself how to read it
    assert load_tokenizer(str(folder)) == tokenizer


def test_an_interrupted_build_leaves_nothing(
    tmp_path: Path, corpus: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(source: Source, report: Any = None) -> Iterator[PlacedText]:
        yield PlacedText(Path("somewhere"), 1, "something")
        raise KeyboardInterrupt

    tokenizer, cache = load_tokenizer("bytes"), tmp_path / "cache"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokens_module, "placed_documents", broken)
        open_source(corpus, tokenizer, cache)
    assert not [path for path in cache.iterdir() if path.is_dir()]
    assert len(open_source(corpus, tokenizer, cache).offsets) == 4


def test_cache_root_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "env"))
    assert cache_root(tmp_path / "recipe") == tmp_path / "recipe"
    assert cache_root() == tmp_path / "env"
    monkeypatch.delenv("WEFT_CACHE")
    assert cache_root() == Path.home() / ".cache" / "weft"


def test_an_unwritable_cache_is_one_line(tmp_path: Path, corpus: Source) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WeftError, match=r"data\.cache") as error:
        open_data(Data(sources=(corpus,), cache=tmp_path / "file" / "cache"))
    assert "\n" not in str(error.value)


def test_an_empty_corpus_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(WeftError, match=r"empty\.txt"):
        open_data(
            Data(
                sources=(Source(kind="text", path=str(tmp_path / "empty.txt")),),
                cache=tmp_path / "cache",
            )
        )


@pytest.mark.slow
def test_processes_that_start_together_build_once(
    tmp_path: Path, corpus: Source
) -> None:
    """Each process counts the documents it tokenized itself: all by one, none by the other."""
    program = (
        "import sys, time; from weft.data import tokens; from weft.data.tokenizer import load_tokenizer;"
        "from weft.recipe import Source; real, n = tokens.placed_documents, []\n"
        "def slow(*given):\n"
        "    for text in real(*given): n.append(1); time.sleep(0.3); yield text\n"
        "tokens.placed_documents = slow; sys.stdin.readline()\n"
        "print(len(n), tokens.open_source(Source(kind='text', path=sys.argv[1]), load_tokenizer('bytes'))"
        ".fingerprint, len(n))"
    )
    environment = {
        **os.environ,
        "WEFT_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-c", program, str(corpus.path)]
    pipe = subprocess.PIPE
    ranks = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        for _ in range(2)
    ]
    for rank in ranks:
        assert rank.stdin
        rank.stdin.write("go\n")
        rank.stdin.flush()
    seen = [rank.communicate(timeout=60)[0].split() for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks)
    assert seen[0][1] == seen[1][1] and sorted(one[2] for one in seen) == ["0", "3"]
