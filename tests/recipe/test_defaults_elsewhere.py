"""What ``docs/how-to/coming-from.md`` says of defaults, and the run that it shows twice."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from weft.recipe import Recipe, build_recipe

PAGE = (Path(__file__).parents[2] / "docs/how-to/coming-from.md").read_text()


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    """Defaults of transformers and of PEFT."""
    from dataclasses import MISSING, fields

    from peft import LoraConfig
    from transformers import TrainingArguments

    return {
        field.name: field.default
        for kind in (LoraConfig, TrainingArguments)
        for field in fields(kind)
        if field.default is not MISSING
    }


def block(language: str) -> str:
    """The only piece of the page in a language."""
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(text)


def literal(cell: str) -> Any:
    """The value at the beginning of a cell, None without one."""
    match = re.match(r"`([^`=]*)`", cell)
    return None if match is None else ast.literal_eval(match[1])


def here(name: str) -> Any:
    """A default of a recipe with an adapter."""
    recipe = build_recipe({"adapter": {}, "model": {"from": "no/such"}})
    section, _, key = name.partition(".")
    value = getattr(getattr(recipe, section), key)
    return list(value) if isinstance(value, tuple) else value


def test_defaults_that_differ_are_those_of_both(theirs: dict[str, Any]) -> None:
    head = PAGE.index("| here | if left out | transformers | there |")
    table = PAGE[head:].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert len(rows) == 9
    for name, own, words, other in rows:
        if (value := literal(own)) is not None:
            assert here(name.strip("`")) == value, name
        given = [theirs.get(word) for word in re.findall(r"`(\w+)`", words)]
        if (value := literal(other)) is not None:
            assert value == (given if isinstance(value, list) else given[0]), name
            assert value != literal(own), name


def test_defaults_of_which_the_page_says_nothing_are_the_same(
    theirs: dict[str, Any],
) -> None:
    same = {"optimizer.clip": "max_grad_norm", "optimizer.eps": "adam_epsilon",
            "adapter.rank": "r", "adapter.dropout": "lora_dropout",
            "train.batch": "per_device_train_batch_size"}  # fmt: skip
    for name, word in same.items():
        assert here(name) == theirs[word], name


def test_the_run_side_by_side_is_one(theirs: dict[str, Any]) -> None:
    calls = [n for n in ast.walk(ast.parse(block("python"))) if isinstance(n, ast.Call)]
    said = {
        keyword.arg: ast.literal_eval(keyword.value)
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id in ("SFTConfig", "LoraConfig")
        for keyword in call.keywords
        if keyword.arg
    }
    ask = (theirs | said).__getitem__
    recipe: Recipe = build_recipe(tomllib.loads(block("toml")))
    assert recipe.adapter is not None
    how, train = recipe.optimizer, recipe.train
    assert (how.lr, how.schedule) == (ask("learning_rate"), ask("lr_scheduler_type"))
    assert how.betas == (ask("adam_beta1"), ask("adam_beta2"))
    assert (how.eps, how.clip) == (ask("adam_epsilon"), ask("max_grad_norm"))
    assert (how.weight_decay, how.warmup) == (ask("weight_decay"), ask("warmup_steps"))
    assert how.min_lr == 0  # where a cosine of transformers ends
    assert train.micro_batch == ask("per_device_train_batch_size")
    assert train.batch == train.micro_batch * ask("gradient_accumulation_steps")
    assert (train.dtype == "bfloat16", train.steps) == (ask("bf16"), 0)
    assert recipe.data.epochs == ask("num_train_epochs")
    assert (recipe.data.seq_len, recipe.data.validation) == (ask("max_length"), 0)
    assert recipe.data.chat.pack == ask("packing")
    assert (recipe.data.chat.learn == "assistant") == ask("assistant_only_loss")
    assert (recipe.adapter.rank, recipe.adapter.alpha) == (ask("r"), ask("lora_alpha"))
    assert recipe.adapter.targets == ("*",) and ask("target_modules") == "all-linear"
    assert recipe.adapter.dropout == ask("lora_dropout")
