"""Several models with equal weights: each content in memory once, in blocks that are one object."""

from __future__ import annotations

import gc
from zlib import crc32

import pytest
import torch

from weft.errors import WeftError
from weft.layout.mesh import Mesh
from weft.models.shared_weights import SharedWeights, chain_of, part_of
from weft.models.transformer import Transformer
from weft.models.values import Values
from weft.parallel.build import connect, whole_model
from weft.recipe import ModelShape

SHAPE = ModelShape(
    vocab=31, layers=6, embed=16, heads=4, kv_heads=2, ffn=24, init_std=0.5
)
UNTIED = SHAPE.model_copy(update={"tied": False})

Weights = dict[str, torch.Tensor]


def random_weights(shape: ModelShape, seed: int = 0) -> Weights:
    drawn = torch.Generator().manual_seed(seed)
    model = Transformer(shape, Mesh.single())
    return {
        name: torch.randn(p.shape, generator=drawn) * 0.4 + (p.dim() == 1)
        for name, p in model.named_parameters()
    }


def tuned(base: Weights, *parts: str) -> Weights:
    """``base`` with other weights in ``parts``."""
    drawn = torch.Generator().manual_seed(crc32(" ".join(parts).encode()))
    return {
        name: w + 0.3 * torch.randn(w.shape, generator=drawn)
        if part_of(name) in parts
        else w.clone()
        for name, w in base.items()
    }


def values_of(weights: Weights, read: list[str] | None = None) -> Values:
    def values(name: str, *_: object) -> torch.Tensor:
        if read is not None:
            read.append(name)
        return weights[name].clone()

    return values


def empty(shape: ModelShape = SHAPE) -> Transformer:
    model = whole_model(shape, Mesh.single())
    connect(model, model.mesh, "none")
    return model


def size_of(models: list[Transformer]) -> int:
    """Bytes of the distinct tensors of ``models``, counted by their places in memory."""
    tensors = [p for model in models for p in model.parameters()]
    return sum({p.data_ptr(): p.nbytes for p in tensors}.values())


@pytest.mark.parametrize("shape", [SHAPE, UNTIED], ids=["tied", "untied"])
def test_ten_fine_tunes_add_what_differs(shape: ModelShape) -> None:
    base = random_weights(shape)
    kinds = [
        tuned(base, f"blocks.{i % 6}", f"blocks.{(i + 1 + i // 6) % 6}")
        for i in range(10)
    ]
    shared, models = SharedWeights(None), [empty(shape)]
    shared.fill(models[0], values_of(base))
    whole = size_of(models)
    for weights in kinds:
        models.append(empty(shape))
        shared.fill(models[-1], values_of(weights))
    apart = sum(base[n].nbytes for n in base if part_of(n) in ("blocks.0", "blocks.1"))
    assert size_of(models) <= whole * (1 + 10 * apart / whole)
    assert size_of(models) == shared.nbytes == whole + 10 * apart
    for weights, model in zip((base, *kinds), models, strict=True):
        for name, p in model.named_parameters():
            assert torch.equal(p, weights[name])
    chains = [chain_of(model) for model in models]
    same = [sum(a == b for a, b in zip(chains[0], c, strict=True)) for c in chains]
    assert same == [8] + [6] * 10
    models[1:], model, p = [], models[0], None
    gc.collect()
    assert shared.nbytes == whole, "what no model has any more is freed"


@pytest.mark.parametrize("form", ["float", "int8"])
@pytest.mark.parametrize("shape", [SHAPE, UNTIED], ids=["tied", "untied"])
def test_converted_weights_exist_once_too(shape: ModelShape, form: str) -> None:
    base = random_weights(shape)
    shared, first = SharedWeights(form), empty(shape)
    shared.fill(first, values_of(base))
    whole = shared.nbytes
    again, other = empty(shape), empty(shape)
    shared.fill(again, values_of(base))
    assert shared.nbytes == whole and chain_of(again) == chain_of(first)
    # a tensor of one block: the block differs, all its other weights are shared
    kind = base | {"blocks.2.ffn.down": base["blocks.2.ffn.down"] * 2}
    shared.fill(other, values_of(kind))
    own = shared.nbytes - whole
    assert 0 < own <= base["blocks.2.ffn.down"].nbytes * 1.5
    assert [a == b for a, b in zip(chain_of(first), chain_of(other), strict=True)] == [
        place != 3 for place in range(8)
    ]


def test_only_what_is_not_alive_is_read_again() -> None:
    base = random_weights(UNTIED)
    kind = tuned(base, "blocks.1", "blocks.4")
    shared, first, other = SharedWeights(), empty(UNTIED), empty(UNTIED)
    shared.fill(first, values_of(base))
    known = shared.fill(other, values_of(kind))
    logits, ids = [], torch.tensor([[1, 2, 3]])
    for _ in range(2):
        with torch.inference_mode():
            ends = torch.tensor([0, 3], dtype=torch.int32)
            logits.append(other(ids, ids, ends))
        del other
        gc.collect()
        read, living = list[str](), shared.living(known)
        layers = [i for i in range(6) if f"blocks.{i}" not in living]
        other = Transformer(UNTIED, Mesh.single(), layers=layers)
        connect(other, other.mesh, "none")
        reading = values_of(kind, read)
        assert shared.fill(other, reading, known, living, unchanged=True) == known
        assert [*other.blocks] == [*map(str, range(6))]
        del living
        assert {part_of(name) for name in read} == {"blocks.1", "blocks.4"}
    assert torch.equal(*logits)
    del other
    gc.collect()
    changed = tuned(base, "blocks.4")
    with pytest.raises(WeftError, match=r"blocks\.1.* has changed since"):
        shared.fill(empty(UNTIED), values_of(changed), known, shared.living(known))
