"""Experts that a task does not use are left out, those that follow each other stand side by side: the same model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.test_mixtures import folder_of
from tests.conftest import Command
from weft.checkpoint.convert.routing import chosen_experts
from weft.checkpoint.model import open_model, tokenizer_of
from weft.errors import UsageError
from weft.generate.leader import check_layout
from weft.layout.layout import Layout
from weft.recipe import ModelShape

TEXT = "".join(
    f"def add_{i}(a, b):\n    return a + {i * 7} * b  # and the sum of {i}\n"
    for i in range(40)
)


@pytest.mark.parametrize(("layout", "shape", "words"), [
    ("cp=4,ep=3", {"experts": 8}, "ep"),
    ("cp=4,ep=4,dispatch=all-gather", {"experts": 8}, "'all-gather' does not send; use all-to-all or per-rank"),
    ("cp=4,ep=4", {}, "ep = 4 spreads experts over ranks, and the model has none"),
    ("cp=4,ep=4", {"experts": 3}, "ep = 4 cuts the 3 experts of a layer"),
])  # fmt: skip
def test_layouts_that_cannot_are_one_line(
    layout: str, shape: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        check_layout(Layout.parse(layout), ModelShape(**{"expert_ffn": 6, **shape}))
    assert "\n" not in str(caught.value)


def logits_of(folder: Path) -> torch.Tensor:
    model, files, _ = open_model(str(folder), "cpu", print)
    ids = torch.from_numpy(tokenizer_of(files, folder).encode(TEXT))[None, :300]
    positions = torch.arange(ids.shape[1])[None]
    with torch.inference_mode():
        return model(ids, positions, torch.tensor([0, ids.shape[1]], dtype=torch.int32))


@pytest.mark.parametrize(
    "more", [(), pytest.param(("--most-load", 1.5), marks=pytest.mark.slow)]
)
def test_the_order_of_experts_changes_nothing_but_where_they_are(
    command: Command, more: tuple[object, ...], tmp_path: Path
) -> None:
    folder, _ = folder_of("qwen3 moe, every second", tmp_path / "model")
    (tmp_path / "texts").write_text(TEXT)
    words = (
        "export",
        "--from",
        folder,
        "--texts",
        tmp_path / "texts",
        "--out",
        tmp_path / "placed",
        "--place",
        3,
        *more,
    )
    code, out, err = command(*words)
    stays = re.search(
        r"([\d.]+)% of the steps .* stay on one of 3 ranks \(of a random order ([\d.]+)%\)",
        out,
    )
    assert code == 0 and stays and float(stays[1]) > float(stays[2]), out + err
    before, after = (
        load_file(path / "model.safetensors") for path in (folder, tmp_path / "placed")
    )
    router = "model.layers.{}.mlp.gate.weight"
    moved = 0
    for layer in (1, 3):
        rows = (
            after[router.format(layer)][:, None] == before[router.format(layer)]
        ).all(-1)
        order = rows.int().argmax(1).tolist()
        assert sorted(order) == list(range(6)) and rows.sum() == 6
        moved += order != sorted(order)
        for slot, expert in enumerate(order):
            weight = f"model.layers.{layer}.mlp.experts.{{}}.down_proj.weight"
            assert torch.equal(
                after[weight.format(slot)], before[weight.format(expert)]
            )
    assert moved
    torch.testing.assert_close(
        logits_of(tmp_path / "placed"), logits_of(folder), rtol=1e-5, atol=1e-5
    )


def unused(tmp_path: Path) -> Path:
    """A model with six experts, two of which no token can choose."""
    folder, _ = folder_of("deepseek v3 halves", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name][[1, 4]] = -9.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (tmp_path / "texts").write_text(TEXT)
    return folder


def test_experts_that_are_not_used_are_left_out(
    command: Command, tmp_path: Path
) -> None:
    folder = unused(tmp_path)
    words = ("export", "--from", folder, "--texts", tmp_path / "texts", "--out")
    code, out, err = command(*words, tmp_path / "four", "--keep", 4)
    said = r"4 of 6 experts kept in each layer; 0 of [\d,]+ choices were of others, so that"
    assert code == 0 and re.search(said, out), err
    model, files, _ = open_model(str(tmp_path / "four"), "cpu", print)
    assert set(model.shape.mixtures.values()) == {4}
    ids = tokenizer_of(files, "").encode(TEXT).tolist()
    whole = chosen_experts(open_model(str(folder), "cpu", print)[0], ids)
    for kept, before in zip(chosen_experts(model, ids), whole, strict=True):
        assert len(kept) == len(ids) and not ({1, 4} & set(before.ravel()))
        assert (
            torch.tensor([0, 2, 3, 5])[torch.from_numpy(kept)].numpy() == before
        ).all()
    torch.testing.assert_close(
        logits_of(tmp_path / "four"), logits_of(folder), rtol=1e-5, atol=1e-5
    )
    code, out, _ = command(*words, tmp_path / "three", "--keep", 3)
    lost = re.search(
        r"3 of 6 experts kept in each layer; ([\d,]+) of ([\d,]+) choices were of others\n",
        out,
    )
    assert (
        code == 0
        and lost
        and 0 < int(lost[1].replace(",", "")) < int(lost[2].replace(",", "")) / 2
    )


@pytest.mark.parametrize(("name", "more", "line"), [
    ("mixtral", ["--keep", 9], "--keep 9 is not possible: layers have 5 experts, of which a token chooses 2"),
    ("mixtral", ["--place", 9], "--place 9 is more ranks than the 5 experts of a layer"),
    ("mixtral", ["--keep", 3, "--place", 2], "--texts is for --keep or --place; give one of them"),
    ("mixtral", [], "--texts is for --keep or --place; give one of them"),
    ("qwen2 moe", ["--keep", 3], "weights add up to one"),
    ("deepseek v2 groups", ["--place", 2], "chooses from groups"),
    ("llama", ["--place", 2], "has no experts"),
    ("mixtral", ["--place", 2, "--most-load", 0.5], "--most-load 0.5 is a multiple, 1 or more"),
    ("mixtral", ["--place", 2, "--most-load", 2, "--level", 1], "leave out --level"),
    ("mixtral", ["--keep", 3, "--most-load", 2], "give --place RANKS"),
    ("mixtral", ["--place", 2, "--ema"], "which alone have averages"),
])  # fmt: skip
def test_what_cannot_be_is_one_line(
    command: Command, name: str, more: list[object], line: str, tmp_path: Path
) -> None:
    folder, _ = folder_of(name, tmp_path / "model")
    (tmp_path / "texts").write_text(TEXT)
    code, _, err = command(
        "export",
        "--from",
        folder,
        "--out",
        tmp_path / "out",
        "--texts",
        tmp_path / "texts",
        *more,
    )
    # beside bars of transformers
    (said,) = [text for text in err.splitlines() if text.startswith("weft:")]
    assert (
        code == (1 if "--ema" in more else 2)
        and line in said
        and not (tmp_path / "out").exists()
    )


# tests/generate/test_leader.py has them all, in ranks that are there already
@pytest.mark.soak
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp=2,ep=2", "tp=2", "pp=2"])
def test_generate_with_experts_on_two_ranks(
    launched: Command, layout: str, tmp_path: Path
) -> None:
    folder, _ = folder_of("qwen3 moe", tmp_path / "model")
    words = (
        "generate",
        "--checkpoint",
        folder,
        "--prompt",
        "def add(a, b):",
        "--tokens",
        9,
        "--temperature",
        0,
    )
    _, expected, _ = launched(*words)
    code, out, err = launched(*words, "--layout", layout)
    assert code == 0 and out == expected and "over 2 ranks" in err, err
    assert "Warning" not in err
