"""Equal to diffusers: what its schedulers and its DiT computed, as bench/diffusers_peer.py has recorded it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Command
from tests.models.test_diffusion_transformer import model_of
from weft.diffusion.denoiser import Denoiser
from weft.diffusion.noise_process import NoiseProcess
from weft.diffusion.sample import SampleRequest, sample
from weft.errors import UsageError, WeftError
from weft.layout.mesh import Mesh
from weft.models.diffusers_weights import (
    WEIGHTS,
    export_diffusers,
    open_diffusers,
    shape_of_diffusers,
)
from weft.parallel.build import parallelize
from weft.recipe import Train

T = torch.Tensor
RECORDED = Path(__file__).parents[2] / "bench/results/diffusers_peer.json"
SAMPLERS = json.loads(RECORDED.read_text())["samplers"]


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_make_what_those_of_diffusers_make(name: str) -> None:
    sampler, target = name.split()
    process = NoiseProcess(target, "linear" if target == "epsilon" else "cosine")

    def predict(noised: T, time: T, condition: T) -> T:
        level = 1000 * (1 - time) - int(process.target != "flow")
        level = level.view(-1, 1, 1, 1).to(noised.dtype)
        return 0.5 * noised + 0.3 * (noised + level / 1000).sin()

    request = SampleRequest(torch.zeros(1, dtype=torch.int64), 8, sampler, seed=3)
    image = sample(predict, process, (1, 4, 4), request)
    recorded = SAMPLERS[name]
    limit = 1e-5 * max(1, recorded["largest"])
    assert recorded["difference"] <= limit
    expected = torch.tensor(recorded["image"])
    torch.testing.assert_close(image.flatten(), expected, atol=limit, rtol=0)


def test_block_and_loss_are_those_of_diffusers() -> None:
    recorded = json.loads(RECORDED.read_text())
    for part in ("block", "texts"):
        assert recorded[part]["output"] <= 1e-5 * recorded[part]["largest"]
        assert recorded[part]["gradient"] <= 1e-4
    assert recorded["texts"]["back"] <= 1e-5 * recorded["texts"]["largest"]
    assert max(recorded["loss"].values()) <= 1e-5


def test_a_folder_of_diffusers_comes_back(tmp_path: Path) -> None:
    model = model_of(size=(6, 6), variance=True, target="epsilon", schedule="linear")
    wide = model.shape.model_copy(update={"ffn": 64})
    model = parallelize(wide, Mesh.single(), Train()).model  # type: ignore[assignment]
    out = export_diffusers(wide, dict(model.named_parameters()), tmp_path / "dit")
    shape, values = open_diffusers(out)
    again = parallelize(shape, Mesh.single(), Train(), values).model
    noised, time, classes = torch.randn(2, 2, 6, 6), torch.tensor([0.1, 0.7]), torch.tensor([0, 3])  # fmt: skip
    first, second = (Denoiser(m)(noised, time, classes) for m in (model, again))  # type: ignore[arg-type]
    torch.testing.assert_close(first, second, rtol=0, atol=0)


#: A PixArt of states that are five numbers wide.
PIXART: dict[str, Any] = {
    "size": (6, 6), "form": "pixart", "classes": 0, "text": 5, "words": 0, "variance": True,
    "target": "epsilon", "schedule": "linear",
}  # fmt: skip


def test_a_pixart_comes_back(command: Command, tmp_path: Path) -> None:
    """In by weft checkpoint convert, out by both commands; texts as words are refused in a line."""
    shape = model_of(**PIXART).shape.model_copy(update={"ffn": 64})
    model = parallelize(shape, Mesh.single(), Train()).model
    there = export_diffusers(shape, dict(model.named_parameters()), tmp_path / "pixart")
    again, values = open_diffusers(there)
    second = parallelize(again, Mesh.single(), Train(), values).model
    noised, time, states = torch.randn(2, 2, 6, 6), torch.tensor([0.1, 0.7]), torch.randn(2, 3, 5)  # fmt: skip
    outputs = [Denoiser(m)(noised, time, states) for m in (model, second)]  # type: ignore[arg-type]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    assert not torch.equal(outputs[0], Denoiser(model)(noised, time, states + 1))  # type: ignore[arg-type]
    run = tmp_path / "run"
    code, out, err = command("checkpoint", "convert", there, "--out", run)
    assert code == 0 and "from diffusers" in out, err
    code, _, err = command("checkpoint", "convert", run, "--to", "hf", "--out", tmp_path / "out")  # fmt: skip
    assert code == 0, err
    for name in (WEIGHTS, "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (there / name).read_bytes()
    ask = ["sample", "--checkpoint", run, "--out", tmp_path / "drawn"]
    for words in ([], ["--prompt", "a three"]):
        code, _, err = command(*ask, *words)
        assert code == 2 and "text states" in err and err.count("\n") == 1, err


def test_commands_write_and_read_them(command: Command, tmp_path: Path) -> None:
    """Out by weft export, in by weft checkpoint convert and as a model that weft sample opens by itself."""
    model = model_of(size=(6, 6))
    wide = model.shape.model_copy(update={"ffn": 64})
    values = dict(parallelize(wide, Mesh.single(), Train()).model.named_parameters())
    dit, run = export_diffusers(wide, values, tmp_path / "dit"), tmp_path / "run"
    code, out, err = command("checkpoint", "convert", dit, "--out", run)
    assert code == 0 and "from diffusers" in out, err
    for words in (["export", "--checkpoint", run], ["checkpoint", "convert", run, "--to", "hf"]):  # fmt: skip
        again = tmp_path / str(words[0])
        code, _, err = command(*words, "--out", again)
        assert code == 0, err
        assert (again / WEIGHTS).read_bytes() == (dit / WEIGHTS).read_bytes()
        assert (again / "config.json").read_bytes() == (dit / "config.json").read_bytes()  # fmt: skip
    ask = ["sample", "--count", 2, "--steps", 2, "--class", "1"]
    for name, place in {"ours": run, "theirs": dit}.items():
        code, _, err = command(*ask, "--checkpoint", place, "--out", tmp_path / name)
        assert code == 0, err
    torch.testing.assert_close(
        *(torch.load(tmp_path / name / "samples.pt") for name in ("ours", "theirs")), rtol=0, atol=0
    )  # fmt: skip
    half = tmp_path / "half"
    code, _, err = command("export", "--checkpoint", run, "--dtype", "bfloat16", "--out", half)  # fmt: skip
    assert code == 0 and (half / WEIGHTS).stat().st_size < 0.7 * (dit / WEIGHTS).stat().st_size  # fmt: skip


def test_what_diffusers_does_not_have_is_one_line(
    command: Command, tmp_path: Path
) -> None:
    wide = model_of(size=(6, 6)).shape.model_copy(update={"ffn": 64})
    values = dict(parallelize(wide, Mesh.single(), Train()).model.named_parameters())
    dit = export_diffusers(wide, values, tmp_path / "dit")
    ask = ["export", "--checkpoint", dit, "--out", tmp_path / "x.gguf"]
    for words in (["--format", "gguf"], ["--merge"]):
        code, _, err = command(*ask, *words)
        assert code == 2 and f"{' '.join(words)} is of models of tokens" in err, err
        assert err.count("\n") == 1
    ask = ["checkpoint", "convert", dit, "--out", tmp_path / "z"]
    for words in (["--to", "gguf"], ["--to", "dcp"], ["--upcycle", "experts=2"]):
        code, _, err = command(*ask, *words)
        assert code == 2 and "is of models of tokens" in err, err
        assert err.count("\n") == 1
    (dit / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel"}))
    code, _, err = command("sample", "--checkpoint", dit, "--out", tmp_path / "y")
    assert code and "UNet2DModel" in err and err.count("\n") == 1


def test_other_models_of_diffusers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="UNet2DModel"):
        shape_of_diffusers({"_class_name": "UNet2DModel"})
    with pytest.raises(WeftError, match="cannot be read"):
        open_diffusers(tmp_path)
    model = model_of(positions="rotary")
    with pytest.raises(UsageError, match="cannot have a size that is not square"):
        export_diffusers(model.shape, {}, tmp_path / "out")
