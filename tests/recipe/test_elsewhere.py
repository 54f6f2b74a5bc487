"""Words of other programs are answered with Weft's, which exist."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weft
from tests.conftest import Command
from weft.cli.app import app
from weft.errors import UsageError, WeftError
from weft.recipe import Recipe, Source, build_recipe, load_recipe
from weft.recipe.elsewhere import Equivalent, equivalents, here_called, here_it_is
from weft.section import fields_at

PAGE = Path(__file__).parents[2] / "docs/how-to/coming-from.md"


def row(one: Equivalent) -> str:
    """A line of the page's table."""
    cells = [
        ", ".join(f"`{word}`" for word in words)
        for words in (
            one.trl,
            one.llama_factory,
            one.axolotl,
            one.torchtitan,
            one.megatron,
        )
    ]
    weft_word = (
        one.weft if "." in one.weft or one.weft.startswith("-") else f"[{one.weft}]"
    )
    return (
        f"| `{weft_word}` | "
        + " | ".join(cell or "-" for cell in cells)
        + f" | {one.note or '-'} |"
    )


@pytest.mark.parametrize("name", [one.weft for one in equivalents()])
def test_what_others_are_told_exists(name: str) -> None:
    if name.startswith("--"):
        options = [
            word for one in app.parser.commands["train"].params for word in one.opts
        ]
        assert name in options
        return
    *sections, key = name.split(".")
    known = fields_at(Recipe, sections) + (
        list(Source.model_fields) if sections == ["data"] else []
    )
    assert key in known


def test_no_word_has_two_answers_and_none_is_a_setting_of_the_same_name() -> None:
    for one in equivalents():
        for word in one.words:
            assert here_called(word) in [
                other for other in equivalents() if word in other.words
            ]
            assert word != one.weft
    words = [word for one in equivalents() for word in set(one.words)]
    assert [word for word in words if words.count(word) > 1] == []


def test_the_page_has_the_table() -> None:
    lines = PAGE.read_text().splitlines()
    missing = [row(one) for one in equivalents() if row(one) not in lines]
    assert not missing, "\n".join(["docs/how-to/coming-from.md lacks:", *missing])


@pytest.mark.parametrize(("tree", "said"), [
    ({"train": {"learning_rate": 1e-4}}, "unknown key 'train.learning_rate'; in Weft it is optimizer.lr"),
    ({"lora_rank": 8}, "unknown key 'lora_rank'; in Weft it is adapter.rank"),
    ({"training": {"steps": 8}}, "unknown key 'training'; in Weft it is [train]"),
    ({"train": {"per_device_train_batch_size": 8}}, "in Weft it is train.micro_batch (sequences per rank and pass; "),
    ({"data": {"cutoff_len": 8}}, "in Weft it is data.seq_len"),
    ({"zero_optimization": {"stage": 3}}, "in Weft it is layout.zero (1, 2 or 3: what is cut"),
    ({"zero_optimization.stage": 3}, "in Weft it is layout.zero"), ({"stage": "dpo"}, "in Weft it is loss.kind"),
    ({"min_lr": 3e-5}, "in Weft it is optimizer.min_lr (a share of lr)"),
    ({"hidden_size": 64}, "in Weft it is model.embed"), ({"tensor-model-parallel-size": 2}, "in Weft it is layout.tp"),
    ({"train": {"lr": 1e-4}}, "unknown key 'train.lr'; did you mean 'optimizer.lr'?"),
    ({"seed": 1}, "unknown key 'seed'; did you mean 'data.seed' or 'train.seed' or 'federated.seed'?"),
    ({"metrics": {"log_freq": 1}}, "unknown key 'metrics.log_freq'; in Weft it is observe.every"),
    ({"TrainingArguments": {"load_best_model_at_end": True}}, "in Weft it is validation.keep_best (by the loss"),
    ({"adapter": {"modules_to_save": ["lm_head"]}}, "in Weft it is adapter.whole"),
    ({"push_to_hub": True}, "in Weft it is checkpoint.export (or afterwards weft export, which also uploads: --push"),
])  # fmt: skip
def test_a_recipe_in_others_words_is_answered_in_one_line(
    tree: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError) as refused:
        build_recipe(tree)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_what_stands_elsewhere_is_said_before_anything_is_read(
    tmp_path: Path, command: Command
) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[model]\nfrom = "no/such"\n[model.adapter]\nrank = 4\n')
    code, _, err = command("train", recipe)
    assert (code, err) == (
        2, f"weft: error: {recipe}: unknown section [model.adapter]; adapters have a section of their own, [adapter]\n"
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"adapter = Adapter\(\.\.\.\)"):
        Recipe(model=weft.ModelShape(origin="no/such", adapter=weft.Adapter()))
    code, _, err = command("train", "quickstart", "--learning-rate", "1e-4")
    assert code == 2
    assert err.startswith(
        "weft: error: No such option: --learning-rate; in Weft it is --set optimizer.lr=...; see '"
    )
    for option, said in {"--lr": "write --set optimizer.lr=...", "--train.steps": "write --set train.steps=...",
                         "--seed": "write --set data.seed=... or --set train.seed=... or --set federated.seed=...",
                         }.items():  # fmt: skip
        assert (
            f"No such option: {option}; {said}; see"
            in command("train", "quickstart", option, "1")[2]
        )
    yaml = tmp_path / "mine.yaml"
    yaml.write_text("learning_rate: 1e-4\n")
    with pytest.raises(
        UsageError, match=r"recipes are TOML files; docs/how-to/coming-from\.md"
    ):
        load_recipe(yaml)


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_word_has_an_answer_or_none(word: str) -> None:
    assert isinstance(here_it_is(word), str) and isinstance(
        here_it_is(word, as_option=True), str
    )


SECTIONS = [
    name for name in weft.__all__ if isinstance(getattr(weft, name), type(weft.Train))
]


@pytest.mark.parametrize("name", SECTIONS)
def test_a_wrong_value_in_a_program_is_one_line(name: str) -> None:
    """Of every section: a wrong key, and a wrong value of each of its fields."""
    section = getattr(weft, name)
    needed = {
        key: "x" for key, field in section.model_fields.items() if field.is_required()
    }
    for field in (*section.model_fields, "no_such_key"):
        with pytest.raises(WeftError) as refused:
            section(**{**needed, field: object()})
        text = str(refused.value)
        assert (
            text.startswith(f"{name}: ")
            and field in text.replace("origin", "from origin")
            and "\n" not in text
        ), text


def test_a_wrong_value_deep_in_a_program_names_its_place() -> None:
    for made, said in (
        (
            lambda: Recipe(train=weft.Train(steps=-5)),
            "Train: steps = -5: it should be greater than or equal to 0 (steps: "
            "Number of optimizer steps in the run, unless data.epochs ends it earlier)",
        ),
        (
            lambda: Recipe(train={"steps": -5}),
            "Recipe: train.steps = -5: it should be greater than or equal to 0 (steps: "
            "Number of optimizer steps in the run, unless data.epochs ends it earlier)",
        ),
        (
            lambda: Recipe(train=weft.Optimizer()),
            "Recipe: train = Optimizer(...): it should be a section of keys "
            "(train: Length of the run, batch size, number format, device and recomputation)",
        ),
        (
            lambda: weft.Task(),
            "Task: path is missing; name a file of questions, or set reward to a task that makes them",
        ),
        (lambda: weft.Layout(tq=2), "Layout: unknown key 'tq'; did you mean 'tp'?"),
        (
            lambda: weft.Train(lr=1.0),
            "Train: unknown key 'lr'; did you mean 'optimizer.lr'?",
        ),
        (
            lambda: weft.Train(learning_rate=1.0),
            "Train: unknown key 'learning_rate'; in Weft it is optimizer.lr",
        ),
    ):
        with pytest.raises(UsageError) as refused:
            made()  # type: ignore[no-untyped-call]
        assert str(refused.value) == said


def test_all_names_can_be_imported_and_are_listed() -> None:
    assert set(weft.__all__) < set(dir(weft))
    assert {"Adapter", "Loss", "Chat", "Sync", "Callback", "register"} < set(dir(weft))
    for name in weft.__all__:
        assert getattr(weft, name) is not None
    assert weft.Callback is sys.modules["weft.plugins"].Callback


@pytest.mark.parametrize(("recipe", "path", "kind"), [
    ("finetune", "talks.jsonl", "chat"), ("preference", "pairs/", "preference"), ("quickstart", "notes/*.txt", "text"),
    ("quickstart", "rows.jsonl.gz", "jsonl"), ("quickstart", "rows.parquet", "parquet"),
])  # fmt: skip
def test_data_of_ones_own_take_the_place_of_a_recipes(
    recipe: str, path: str, kind: str
) -> None:
    """Of the recipe's kind, and nothing else of its sources stays."""
    loaded = load_recipe(recipe, ["data.seq_len=64"], origin="some/model", data=path)
    (source,) = loaded.data.sources
    assert (source.kind, source.path, source.form, source.weight) == (
        kind,
        path,
        "auto",
        1.0,
    )
    assert loaded.model.origin == "some/model" and loaded.data.seq_len == 64
