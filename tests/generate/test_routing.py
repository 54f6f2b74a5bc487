"""Experts that a task does not use are left out, those that follow each other stand side by side: the same model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.cli.test_mixtures import folder_of
from tests.conftest import Command
from tests.generate.one_text import OneText
from weft.checkpoint.model import open_model, tokenizer_of
from weft.errors import UsageError
from weft.generate.engine import generate
from weft.generate.routing import chosen_experts
from weft.generate.sampling import GREEDY
from weft.generate.spread import SpreadReader, check_spread, mesh_of_rank
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.experts import Mixture
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

TEXT = "".join(f"def add_{i}(a, b):\n    return a + {i * 7} * b  # and the sum of {i}\n" for i in range(40))
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"experts": 8, "experts_per_token": 2},
    "deepseek-v3": {"experts": 6, "router": "sigmoid", "router_groups": 3, "router_top_groups": 2, "router_norm": True,
                    "shared_experts": 1, "kv_rank": 10, "rope_dim": 4, "kv_heads": None},
    "two experts": {"experts": 2, "first_dense": 1, "router_early": True},
}  # fmt: skip
PROMPTS = [[3], [7, 1], [(5 * i + 2) % 61 for i in range(13)], [(3 * i + 1) % 61 for i in range(50)]]


def build(name: str, mesh: Mesh) -> Transformer:
    shape = ModelShape(**{"vocab": 61, "layers": 3, "embed": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "init_std": 0.5,
                          "expert_ffn": 24, **MODELS[name]})  # fmt: skip
    return parallelize(shape, mesh, Train(seed=2, dtype="float64"))[0]


def continued(name: str, dispatch: str) -> tuple[list[list[int]], list[Any], int]:
    """On every rank: what follows each prompt, the logits after it and a token, and numbers of experts held here."""
    world = dist.get_world_size()
    layout = Layout(cp=world, ep=world, dispatch=dispatch)  # type: ignore[arg-type]
    model = build(name, mesh_of_rank(layout, "cpu"))
    found = [list(generate(model, prompt, 8, (), GREEDY, layout=layout)) for prompt in PROMPTS]
    logits = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            reader = SpreadReader(model, layout)
            logits.append([None if x is None else x.tolist() for x in (reader.read(prompt), reader.read([4]))])
    experts = sum(p.numel() for m in model.modules() if isinstance(m, Mixture) for p in m.experts.parameters())
    return found, logits, experts


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("world", "name", "dispatch"), [
    (4, "mixtral", "all-to-all"), (2, "deepseek-v3", "per-rank"),
    pytest.param(4, "two experts", "all-to-all", marks=pytest.mark.slow),
    pytest.param(3, "deepseek-v3", "all-to-all", marks=pytest.mark.slow),
])  # fmt: skip
def test_experts_spread_over_ranks_write_the_same(pool: Any, world: int, name: str, dispatch: str) -> None:
    alone = build(name, Mesh.single())
    expected = [list(generate(alone, prompt, 8, (), GREEDY)) for prompt in PROMPTS]
    answers = pool.run(world, continued, name, dispatch)
    whole = sum(p.numel() for m in alone.modules() if isinstance(m, Mixture) for p in m.experts.parameters())
    assert {held for _, _, held in answers} == {whole // world}
    for number, prompt in enumerate(PROMPTS):
        assert all(found[number] == expected[number] for found, _, _ in answers)
        reader = OneText(alone)
        with torch.inference_mode():
            reference = [reader.read(prompt), reader.read([4])]
        for place, one in enumerate(reference):
            (logits,) = [found for _, all_of_rank, _ in answers if (found := all_of_rank[number][place]) is not None]
            torch.testing.assert_close(torch.tensor(logits, dtype=torch.float64), one, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("layout", "shape", "words"), [
    ("cp=4,ep=2", {"experts": 8}, "generation spreads experts over all ranks of cp, .* use --layout cp=4,ep=4"),
    ("cp=4,ep=4,dispatch=all-gather", {"experts": 8}, "by all-to-all or per-rank, as they have unequal"),
    ("cp=4,ep=4", {}, "ep = 4 spreads experts over ranks, and the model has none"),
    ("cp=4,ep=4", {"experts": 3}, "ep = 4 cuts the 3 experts of a layer"),
])  # fmt: skip
def test_layouts_that_cannot_are_one_line(layout: str, shape: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        check_spread(Layout.parse(layout), ModelShape(**{"expert_ffn": 6, **shape}))
    assert "\n" not in str(caught.value)


def logits_of(folder: Path) -> torch.Tensor:
    model, files = open_model(str(folder), "cpu", print)
    ids = torch.from_numpy(tokenizer_of(files, folder).encode(TEXT))[None, :300]
    positions = torch.arange(ids.shape[1])[None]
    with torch.inference_mode():
        return model(ids, positions, torch.tensor([0, ids.shape[1]], dtype=torch.int32))


def test_the_order_of_experts_changes_nothing_but_where_they_are(command: Command, tmp_path: Path) -> None:
    folder, _ = folder_of("qwen3 moe, every second", tmp_path / "model")
    (tmp_path / "texts").write_text(TEXT)
    words = ("export", "--from", folder, "--texts", tmp_path / "texts", "--out", tmp_path / "placed", "--place", 3)
    code, out, err = command(*words)
    stays = re.search(r"([\d.]+)% of the steps .* stay on one of 3 ranks \(of a random order ([\d.]+)%\)", out)
    assert code == 0 and stays and float(stays[1]) > float(stays[2]), out + err
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "placed"))
    router = "model.layers.{}.mlp.gate.weight"
    moved = 0
    for layer in (1, 3):
        rows = (after[router.format(layer)][:, None] == before[router.format(layer)]).all(-1)
        order = rows.int().argmax(1).tolist()
        assert sorted(order) == list(range(6)) and rows.sum() == 6
        moved += order != sorted(order)
        for slot, expert in enumerate(order):
            weight = f"model.layers.{layer}.mlp.experts.{{}}.down_proj.weight"
            assert torch.equal(after[weight.format(slot)], before[weight.format(expert)])
    assert moved
    torch.testing.assert_close(logits_of(tmp_path / "placed"), logits_of(folder), rtol=1e-5, atol=1e-5)


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


def test_experts_that_are_not_used_are_left_out(command: Command, tmp_path: Path) -> None:
    folder = unused(tmp_path)
    words = ("export", "--from", folder, "--texts", tmp_path / "texts", "--out")
    code, out, err = command(*words, tmp_path / "four", "--keep", 4)
    said = r"4 of 6 experts kept in each layer; 0 of [\d,]+ choices were of others, so that"
    assert code == 0 and re.search(said, out), err
    model, files = open_model(str(tmp_path / "four"), "cpu", print)
    assert set(model.shape.mixtures.values()) == {4}
    ids = tokenizer_of(files, "").encode(TEXT).tolist()
    whole = chosen_experts(open_model(str(folder), "cpu", print)[0], ids)
    for kept, before in zip(chosen_experts(model, ids), whole, strict=True):
        assert len(kept) == len(ids) and not ({1, 4} & set(before.ravel()))
        assert (torch.tensor([0, 2, 3, 5])[torch.from_numpy(kept)].numpy() == before).all()
    torch.testing.assert_close(logits_of(tmp_path / "four"), logits_of(folder), rtol=1e-5, atol=1e-5)
    code, out, _ = command(*words, tmp_path / "three", "--keep", 3)
    lost = re.search(r"3 of 6 experts kept in each layer; ([\d,]+) of ([\d,]+) choices were of others\n", out)
    assert code == 0 and lost and 0 < int(lost[1].replace(",", "")) < int(lost[2].replace(",", "")) / 2


@pytest.mark.parametrize(("name", "more", "line"), [
    ("mixtral", ["--keep", 9], "--keep 9 is not possible: layers have 5 experts, of which a token chooses 2"),
    ("mixtral", ["--place", 9], "--place 9 is more ranks than the 5 experts of a layer"),
    ("mixtral", ["--keep", 3, "--place", 2], "--texts is for --keep or --place; give one of them"),
    ("mixtral", [], "--texts is for --keep or --place; give one of them"),
    ("qwen2 moe", ["--keep", 3], "weights add up to one"),
    ("deepseek v2 groups", ["--place", 2], "chooses from groups"),
    ("llama", ["--place", 2], "has no experts"),
    ("mixtral", ["--place", 2, "--ema"], "which alone have averages"),
])  # fmt: skip
def test_what_cannot_be_is_one_line(command: Command, name: str, more: list[object], line: str, tmp_path: Path) -> None:
    folder, _ = folder_of(name, tmp_path / "model")
    (tmp_path / "texts").write_text(TEXT)
    code, _, err = command("export", "--from", folder, "--out", tmp_path / "out", "--texts", tmp_path / "texts", *more)
    (said,) = [text for text in err.splitlines() if text.startswith("weft:")]  # beside bars of transformers
    assert code == (1 if "--ema" in more else 2) and line in said and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_generate_with_experts_on_two_ranks(command: Command, tmp_path: Path) -> None:
    folder, _ = folder_of("qwen3 moe", tmp_path / "model")
    words = ("generate", "--checkpoint", folder, "--prompt", "def add(a, b):", "--tokens", 9, "--temperature", 0)
    _, expected, _ = command(*words)
    ran = subprocess.run([sys.executable, "-m", "weft", *map(str, words), "--layout", "cp=2,ep=2"], text=True,
                         capture_output=True)  # fmt: skip
    assert ran.returncode == 0 and ran.stdout == expected and "over 2 ranks" in ran.stderr, ran.stderr
    assert "Warning" not in ran.stderr
