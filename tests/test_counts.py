"""Calls and bytes of a technique are those of its formula, so that none can pass as another."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from catalogue import (
    PAGE,
    catalogue,
    leaves,
    line_of,
    mended,
    runs_of,
    wrong_figures,
    wrong_rows,
)
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cases import recipe, start, write_corpus
from weft.curation.read_pipeline import load_pipeline
from weft.layout.layout import Layout
from weft.layout.sequence import padded_length
from weft.recipe.conflicts import AskedRecipe
from weft.recipe.read import load_recipe
from weft.recipe.step_techniques import asked_techniques
from weft.registry import KINDS
from weft.train.step import train_step

ROOT = Path(__file__).parents[1]
LAYERS, HEADS, KV, DIM, EMBED = 2, 4, 2, 6, 24


class Recorder(TorchDispatchMode):
    """Counts operators by name, and the bytes of their first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(func).split(".")[0] + "." + str(func).split(".")[1]
        self.calls[name] += 1
        first = args[0] if args else None
        if isinstance(first, torch.Tensor):
            self.elements[name] += first.numel()
        return func(*args, **(kwargs or {}))


def counted(values: dict[str, Any]) -> tuple[dict[str, int], dict[str, int], int]:
    """On every rank: operators of one step after a warm-up step, their elements, and elements sent point to point."""
    _, mesh, model, state, loader = start(values)
    train_step(model, state, loader.step(0) or [], mesh, lr=1e-3, clip=1.0)
    sent = 0
    real = dist.P2POp

    def note(op: Any, tensor: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += tensor.numel() if op is dist.isend else 0
        return real(op, tensor, *rest, **kwargs)

    batches = loader.step(5) or []
    for b in batches:  # one document per row: of several, less travels
        length = b.tokens.shape[1] * mesh.size("cp")
        b.cu_seqlens.resize_(len(b.tokens) + 1).copy_(
            torch.arange(0, len(b.tokens) * length + 1, length)
        )
    with Recorder() as seen, mock.patch("torch.distributed.P2POp", note):
        train_step(model, state, batches, mesh, lr=1e-3, clip=1.0)
    return dict(seen.calls), dict(seen.elements), sent


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def run(
    pool: Any, corpus: str, layout: dict[str, Any], **change: Any
) -> tuple[dict[str, int], dict[str, int], int]:
    """Operators and elements of rank 0, elements sent by all."""
    axes = {f"layout__{k}": v for k, v in layout.items()}
    values = recipe(corpus, train__batch=4, **axes, **change).model_dump(mode="json")
    answers = pool.run(Layout(**layout).world, counted, values)
    return *answers[0][:2], sum(sent for *_, sent in answers)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("context", "share"), [("ring", 1), ("zigzag", 1.5)])
def test_rings_send_what_their_formula_says(
    pool: Any, corpus: str, size: int, context: str, share: float
) -> None:
    layout = {"cp": size, "context": context}
    _, _, sent = run(pool, corpus, layout)
    tokens = 4 * padded_length(19, Layout(**layout))  # rows x tokens
    # forward once, backward twice
    assert sent == LAYERS * (size - 1) * 3 * share * tokens * KV * DIM


@pytest.mark.parametrize("size", [2, 4])
def test_ulysses_exchanges_what_its_formula_says(
    pool: Any, corpus: str, size: int
) -> None:
    layout = {"cp": size, "context": "ulysses"}
    calls, _, sent = run(pool, corpus, layout)
    assert sent == 0
    assert calls["weft.exchange_heads"] == LAYERS * 8


def test_tensor_parallel_calls(pool: Any, corpus: str) -> None:
    calls, elements, _ = run(pool, corpus, {"tp": 2})
    # Per layer two regions each way, and the head's gather and the embedding's scatter.
    assert calls["_c10d_functional.all_gather_into_tensor"] == LAYERS * 4 + 2
    assert calls["_c10d_functional.reduce_scatter_tensor"] == LAYERS * 4 + 2
    tokens = 4 * padded_length(19, Layout(tp=2))
    assert (
        elements["_c10d_functional.reduce_scatter_tensor"]
        == (LAYERS * 4 + 2) * tokens * EMBED
    )
    # Token count, the step's sums, and one for all gradients of norms.
    assert calls["_c10d_functional.all_reduce"] == 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("stage", "gathers", "scatters"), [(1, 1, 1), (2, 1, 2), (3, 4, 2)]
)
def test_zero_stages_differ_in_traffic(
    pool: Any, corpus: str, stage: int, gathers: int, scatters: int
) -> None:
    """Two passes; ``gathers`` per block and step. The root group is gathered once per pass under stage 3."""
    calls, _, _ = run(pool, corpus, {"shard": 2, "zero": stage}, train__micro_batch=1)
    root = 2 if stage == 3 else 1
    assert calls["c10d._allgather_base_"] == LAYERS * gathers + root
    assert calls["c10d._reduce_scatter_base_"] == (LAYERS + 1) * scatters


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mode", "runs"), [("none", 1), ("selective", 1), ("full", 2)])
@pytest.mark.parametrize("layout", [
    {"tp": 2}, {"cp": 2}, {"cp": 2, "context": "ulysses"}, {"cp": 4, "ulysses": 2}, {"cp": 2, "context": "rsa"},
], ids=str)  # fmt: skip
def test_selective_recompute_skips_attention_and_its_moves(
    pool: Any, corpus: str, mode: str, runs: int, layout: dict[str, Any]
) -> None:
    calls, _, sent = run(pool, corpus, layout, train__recompute=mode)
    table, two_rounds = (
        "cp" in layout and "context" not in layout,
        layout.get("context") == "rsa",
    )
    operator = (
        "weft.tile_attention"
        if table
        else "weft.ring_self_attention"
        if two_rounds
        else "weft.attention"
    )
    assert calls[operator] == LAYERS * runs
    exchanged = Layout(**layout).head_ranks > 1
    assert calls.get("weft.exchange_heads", 0) == (
        4 * LAYERS * (1 + runs) if exchanged else 0
    )
    block = 4 * padded_length(19, Layout(**layout)) * KV * DIM
    assert sent == LAYERS * (1.5 if table else 1.0 if two_rounds else 0.0) * block * (
        2 + runs
    )


def test_catalogue_names_what_exists() -> None:
    from weft.cli.app import app
    from weft.recipe.shipped import catalogue_rows

    root = Path(__file__).parents[1]
    for row in catalogue_rows():
        for path in [*row[2].split(", "), *row[4].partition(" (")[0].split(", ")]:
            path = path.strip("`")
            assert "/" not in path or (root / path).exists(), path
        words = row[3].replace("`", "").replace(",", " ").split()
        if words[0] == "weft":
            command: Any = app.parser
            for word in words[1:]:
                command = getattr(command, "commands", {}).get(word, command)
            known = {name for param in command.params for name in param.opts}
            assert {word for word in words if word.startswith("--")} <= known, row[3]
        files = [root / "recipes" / word for word in words if word.endswith(".toml")]
        files += [root / word for word in words if word.endswith((".py", ".md"))]
        if words[:2] == ["python", "-m"]:
            files += [root / words[2].replace(".", "/") / "__main__.py"]
        assert words[0] in ("any", "weft") or (
            files and all(file.is_file() for file in files)
        ), row[3]


def test_figures_of_the_catalogue_stand_in_results() -> None:
    """Every number that a row has of a script is in what that script has written; another number is seen."""
    rows = list(catalogue())
    assert (
        len(rows) > 150 and [line for row in rows for line in wrong_figures(row)] == []
    )
    (row,) = (row for row in rows if row.technique.startswith("Muon"))
    assert list(
        wrong_figures(row._replace(figure=row.figure.replace("2.182", "2.183")))
    )
    assert list(
        wrong_figures(row._replace(figure="4 times as fast (`bench/nothing.py`)"))
    )


def test_rows_of_techniques_are_what_they_declare() -> None:
    """If this fails: ``python bench/catalogue.py --mend`` after the declarations say what the lines name."""
    known = leaves()
    assert {"weft/techniques/optimizers/muon.py", "weft/techniques/context/rsa/"} <= {
        *known
    }
    assert list(wrong_rows(PAGE.read_text(), known)) == []


def test_rows_of_techniques_are_mended() -> None:
    known = {file: leaf for file, leaf in leaves().items() if "optimizers/" in file}
    page = "# Rows\n\n" + "".join(f"{line_of(leaf)}\n" for leaf in known.values())
    assert mended(page, known) == page
    muon, lion = (f"weft/techniques/optimizers/{name}.py" for name in ("muon", "lion"))
    # changed by hand, twice, or missing
    spoilt = page.replace(line_of(known[muon]), line_of(known[muon])[:-2] + "s |")
    spoilt = spoilt.replace(line_of(known[lion]), "\n".join([line_of(known[lion])] * 2))
    assert [line.partition(":")[0] for line in wrong_rows(spoilt, known)] == [
        lion,
        muon,
    ]
    assert mended(spoilt, known) == page
    less = page.replace(line_of(known[muon]) + "\n", "")
    (line,) = wrong_rows(less, known)
    assert muon in line and "python bench/catalogue.py --mend" in line
    assert sorted(mended(less, known)) == sorted(page)
    # a row whose module was the core's, of the same title; one whose file is gone
    assert mended(page.replace(f"`{muon}`", "`weft/train/muon.py`"), known) == page
    gone = line_of(known[muon]).replace("muon.py", "moon.py").replace("Muon", "Moon")
    assert mended(f"{page}{gone}\n", known) == page
    # a declaration without its figure does not take the row's
    known[muon] = replace(known[muon], figure="")
    (line,) = wrong_rows(page, known)
    assert "no figure=" in line and mended(page, known) == page


def operators_named(file: Path) -> list[str]:
    """The operators of a pipeline, which is read as `weft data run` reads it, or of a page."""
    if file.suffix == ".md":
        return re.findall(r'(?m)^operator = "([\w-]+)"', file.read_text())
    path = ROOT / "recipes" / file.relative_to(ROOT)
    return [step.operator for step in load_pipeline(path).steps]


def test_recipes_of_techniques_name_them() -> None:
    for file, leaf in leaves().items():
        name, *words = shlex.split(leaf.recipe)
        if name == "weft":  # an option of this command names it
            setting = KINDS[leaf.kind].setting
            in_layout = f"{setting.removeprefix('layout.')}={leaf.name}"
            # a field of the option --layout, an option, or the command's argument
            argument = leaf.recipe.startswith(f"{setting} {leaf.name}")
            assert in_layout in leaf.recipe or setting in words or argument, file
            continue
        if (
            leaf.kind == "operator"
        ):  # a pipeline's file names it, or a page with what is a user's own
            assert leaf.name in operators_named(ROOT / name), file
            continue
        given = list(zip(words[::2], words[1::2], strict=True))
        layout = next((value for word, value in given if word == "--layout"), None)
        sets = [value for word, value in given if word == "--set"]
        path = ROOT / "recipes" / name if "/" in name else name
        recipe = load_recipe(path, sets, layout)
        if leaf.kind == "phases":  # settings of many sections ask for them
            asked = asked_techniques(AskedRecipe(**dict(recipe)))
            assert leaf in [technique.declared for technique in asked], file
            continue
        section, _, field = KINDS[leaf.kind].setting.partition(".")
        if not field:  # the section itself asks for it
            assert getattr(recipe, section) is not None, file
            continue
        given_section = getattr(recipe, section)
        if isinstance(given_section, tuple):
            assert leaf.name in [getattr(each, field) for each in given_section], file
            continue
        value = getattr(given_section, field)
        # a compressor's word also has its argument
        word = value[: len(leaf.name)] if leaf.kind == "compressor" else value
        assert word == leaf.name, f"{file}: recipe={leaf.recipe!r} does not name it"


def test_rows_of_the_catalogue_say_when_their_tests_run(tmp_path: Path) -> None:
    assert [
        row.technique
        for row in catalogue()
        if row.tests and row.runs != runs_of(row.tests)
    ] == []
    file = tmp_path / "test_some.py"
    for text, runs in (
        ("@pytest.mark.soak\ndef test_much() -> None:", "soak"),
        ("@pytest.mark.slow\ndef test_little() -> None:", "daily"),
        (
            "def test_little() -> None: ...\n\n\n@pytest.mark.soak\ndef test_much() -> None:",
            "daily, more in soak",
        ),
        ("@pytest.mark.sampled(2)\ndef test_many() -> None:", "daily, more in soak"),
    ):
        file.write_text(text)
        assert runs_of((str(file),)) == runs
