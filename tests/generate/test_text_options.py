"""``weft generate`` with more than one text: each way writes what its function does, and what cannot be is one line."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from rich.control import strip_control_codes

from tests.chats import TEMPLATES, save_tokenizer
from tests.conftest import Command
from tests.serve.running import build
from weft import registry
from weft.data.tokenizer import load_tokenizer
from weft.errors import WeftError
from weft.generate.backend import Hypothesis
from weft.generate.beam_search import Search
from weft.generate.engine import Engine
from weft.generate.joined_texts import Tags, multiverse
from weft.generate.sampling import GREEDY, Sampling
from weft.generate.text_options import TAGS, TextOptions
from weft.techniques.drafters.small_model import DraftModel

PROMPT = "def add"
SMALL = {
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16,
    "intermediate_size": 24,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of random weights."""
    folder = save_tokenizer(
        tmp_path_factory.mktemp("model") / "tiny", TEMPLATES["smollm2"]
    )
    vocab = len(transformers.AutoTokenizer.from_pretrained(folder))
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, vocab_size=vocab, initializer_range=0.5)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def texts_of(out: str) -> dict[str, str]:
    """The texts that were shown, by heading."""
    found: dict[str, str] = {}
    heading = ""
    for line in out.split("\n"):
        if line.endswith("─"):
            heading = line.rstrip("─").strip()
            found[heading] = ""
        else:
            found[heading] += line + "\n"
    return {heading: text[:-1] for heading, text in found.items() if heading}


def test_several_texts_are_those_of_seeds_that_follow_each_other(
    command: Command, folder: Path
) -> None:
    words = ("generate", "--from", folder, "--prompt", PROMPT, "--tokens", 8)
    code, out, err = command(*words, "--texts", 3, "--seed", 5)
    assert code == 0, err
    written = [
        command(*words, "--seed", seed)[1].removeprefix(PROMPT)[:-1]
        for seed in (5, 6, 7)
    ]
    alone = [strip_control_codes(text) for text in written]
    assert [*texts_of(out).values()] == alone and len({*alone}) == 3
    # Stop strings cut each of them.
    mark = alone[1][2:4]
    cut = [
        *texts_of(
            command(*words, "--texts", 3, "--seed", 5, "--stop", mark)[1]
        ).values()
    ]
    assert cut == [text.split(mark)[0] for text in alone]
    # What most of them say, which here is how the first one begins.
    said = texts_of(
        command(*words, "--texts", 3, "--seed", 5, "--answer", "(?s)^(..)")[1]
    )
    beginnings = [text[:2].strip() for text in alone]
    assert said["answers"].startswith("  1 x ") and len({*beginnings}) == 3
    assert said["most say"].strip() in beginnings


def test_one_beam_is_the_likeliest_token_each_time(
    command: Command, folder: Path
) -> None:
    words = ("generate", "--from", folder, "--prompt", PROMPT, "--tokens", 6)
    (text,) = texts_of(command(*words, "--beams", 1)[1]).values()
    assert text == command(*words, "--temperature", 0)[1].removeprefix(PROMPT)[:-1]
    found = texts_of(command(*words, "--beams", 5, "--texts", 4)[1])
    chances = [float(heading.split()[1]) for heading in found]
    assert len(found) == 4 and chances[0] == max(chances)


def test_beam_search_takes_gnmt_s_settings(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for reaches the search, and pruning by nothing leaves the likeliest token at each place."""
    searches: list[Search] = []
    advance = Search.run

    def noted(search: Search) -> list[Hypothesis]:
        searches.append(search)
        return advance(search)

    monkeypatch.setattr(Search, "run", noted)
    words = (
        "generate",
        "--from",
        folder,
        "--prompt",
        PROMPT,
        "--tokens",
        6,
        "--beams",
        4,
    )
    pruned = texts_of(command(*words, "--prune", 1e-9, "--length-penalty", 1.5)[1])
    assert (searches[-1].alpha, searches[-1].prune) == (1.5, 1e-9)
    assert [*pruned.values()] == [
        command(*words[:-2], "--temperature", 0)[1].removeprefix(PROMPT)[:-1]
    ]
    command(*words, "--length-penalty", 0)
    assert (searches[-1].alpha, searches[-1].prune) == (0, math.inf)


def test_a_small_model_runs_ahead(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text without guesses, by guesses that were there before they were asked for."""
    drafters: list[DraftModel] = []

    class Noted(DraftModel):
        def __init__(self, *given: Any, **settings: Any) -> None:
            super().__init__(*given, **settings)
            drafters.append(self)

    small = registry.find("drafter", "small-model")
    monkeypatch.setitem(
        registry._REGISTERED,
        ("drafter", "small-model"),
        replace(small, implementation=Noted),
    )
    words = (
        "generate",
        "--from",
        folder,
        "--prompt",
        PROMPT,
        "--tokens",
        12,
        "--temperature",
        0,
    )
    alone = command(*words)[1]
    assert command(*words, "--draft", folder, "--ahead", 2)[1] == alone
    assert drafters[-1].ahead == 2 and drafters[-1].ready
    assert command(*words, "--draft", folder)[1] == alone
    assert drafters[-1].ahead == 0 and not drafters[-1].ready
    early = (*words, "--draft", folder, "--ahead", 2, "--early-layer")
    assert command(*early, 1)[1] == alone
    assert drafters[-1].early_layer == 1 and drafters[-1].needed
    code, _, err = command(*early, 2)
    assert code == 2 and "none of the layers before the last; give 1 to 1" in err


def test_workers_see_each_other(command: Command, folder: Path) -> None:
    """The first one alone writes other tokens than with somebody whose text it sees."""
    words = (
        "generate",
        "--from",
        folder,
        "--prompt",
        PROMPT,
        "--tokens",
        8,
        "--temperature",
        0,
    )
    one, two = (texts_of(command(*words, "--workers", n)[1]) for n in (1, 2))
    assert [*two] == ["worker 1", "worker 2"] and one["worker 1"] != two["worker 1"]


def test_a_model_that_parts_its_text(command: Command, tmp_path: Path) -> None:
    """A model that knows one token's successor: an outline, its path, a conclusion, the end."""
    outline, goal, _, _, conclusion = TAGS
    follows = {
        "begin": outline,
        outline: "step",
        "step": goal,
        conclusion: "so",
        "so": "</s>",
    }
    names = dict.fromkeys(["</s>", *TAGS, *follows, *follows.values()])
    ids = {name: i for i, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="</s>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>"
    )
    fast.save_pretrained(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=len(ids), hidden_size=16, intermediate_size=4, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=False, eos_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.copy_(torch.eye(len(ids), 16))
        for before, after in follows.items():
            model.lm_head.weight[ids[after], ids[before]] = 9.0
    model.save_pretrained(tmp_path)
    words = (
        "generate",
        "--from",
        tmp_path,
        "--prompt",
        "begin",
        "--tokens",
        5,
        "--temperature",
        0,
    )
    code, out, err = command(*words, "--paths")
    assert code == 0, err
    assert texts_of(out) == {
        "3 pieces": f"{outline} step {goal}\n<Path> step {goal}\n{conclusion} so"
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--beams 2 --workers 2", "--beams and --workers are different ways"),
        ("--answer x", "give --texts"),
        ("--texts 4 --answer (", "no regular expression"),
        ("--texts 4 --workers 2", "leave out --texts"),
        ("--beams 2 --texts 3", "--beams 2 finds 2 texts"),
        ("--texts 2 --temperature 0", "all texts are the same"),
        ("--beams 2 --draft text", "leave out --layout and --draft"),
        ("--workers 2 --layout tp=2", "leave out --layout and --draft"),
        ("--paths", "has no <Outline>"),
        ("--prune 3", "give --beams"),
        ("--length-penalty 0", "give --beams"),
        ("--ahead 2", "there is no --draft"),
        ("--ahead 2 --draft text", "give --draft MODEL"),
    ],
)
def test_what_cannot_be_is_one_line(
    command: Command, folder: Path, words: str, said: str
) -> None:
    code, out, err = command(
        "generate", "--from", folder, "--prompt", PROMPT, *words.split()
    )
    assert code and not out and said in err and err.count("\n") == 1, err


@pytest.mark.parametrize(
    "asked",
    [{"texts": 2}, {"texts": 3, "answer": "(.)"}, {"think": "3"}, {"workers": 2}, {"beams": 2}, {"paths": True}],
    ids=str,
)  # fmt: skip
def test_a_text_without_numbers_ends_each_way_with_its_line(
    asked: dict[str, Any],
) -> None:
    """The embedding of one byte is NaN: nothing is shown of what cannot be computed."""
    model, tokenizer = build(), load_tokenizer("bytes")
    model.embedding.table.data[ord("x")] = torch.nan
    engine, ids = Engine(model, 4096, size=8), tokenizer.prompt_ids("an x")
    with pytest.raises(WeftError, match="are not numbers"):
        if asked.get("paths"):  # of tags that this tokenizer does not have
            multiverse(engine, ids, Tags(1, 2, 3, 4, 5), 4, GREEDY)
        else:
            how = Sampling(seed=1)
            list(TextOptions(**asked).write(engine, tokenizer, ids, 4, how, ()))
    scheduler = engine.scheduler
    assert not (scheduler.running or scheduler.waiting or scheduler.pool.owners)
