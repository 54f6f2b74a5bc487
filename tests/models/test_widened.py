"""Products of 16 bits where the processor multiplies them slowly: float32 by tiles, rounded once."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from weft.layout.mesh import Mesh
from weft.models import fused, widened
from weft.models.widened import is_widened, multiplies_slowly, multiply, widened_note
from weft.parallel.build import parallelize
from weft.recipe import Adapter, ModelShape, Train

SHAPE: dict[str, Any] = {
    "vocab": 96,
    "layers": 2,
    "embed": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "init_std": 0.2,
}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that multiplies bfloat16 slowly."""
    monkeypatch.setattr(
        widened,
        "multiplies_slowly",
        lambda dtype: dtype in (torch.bfloat16, torch.float16),
    )


@pytest.mark.usefixtures("slow")
@given(
    st.integers(0, 70),
    st.integers(1, 40),
    st.integers(1, 200),
    st.integers(0, 7),
    st.sampled_from([None, "plus", "in"]),
)
@settings(max_examples=60, deadline=None)
def test_a_product_is_rounded_once_whatever_its_tiles(
    m: int, k: int, n: int, turned: int, into: str | None
) -> None:
    drawn = torch.Generator().manual_seed(m + k + n)

    def matrix(rows: int, columns: int, transposed: int) -> torch.Tensor:
        made = torch.randn(
            (columns, rows) if transposed else (rows, columns), generator=drawn
        ).bfloat16()
        return made.t() if transposed else made

    a, b = matrix(m, k, turned & 1), matrix(k, n, turned & 2)
    plus = matrix(m, n, turned & 4) if into else None
    exact = a.double() @ b.double() + (0 if plus is None else plus.double())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(widened, "ROWS", 16)
        patch.setattr(widened, "NUMBERS", 64)
        made = multiply(a, b, plus, out=plus if into == "in" else None)
    assert made.dtype == torch.bfloat16 and (into != "in" or made is plus)
    assert ((made.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5).all()


class Watched(TorchDispatchMode):
    """Notes the products of matrices that are computed in here, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = list[str](), list[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, dtypes = (
            func.__name__.partition(".")[0],
            {x.dtype for x in args if isinstance(x, torch.Tensor)},
        )
        if name in ("mm", "addmm", "addmm_", "bmm", "_grouped_mm", "_linear_pointwise"):
            (self.narrow if torch.bfloat16 in dtypes else self.wide).append(
                f"{name} {[*args[0].shape]}"
            )
        return func(*args, **(kwargs or {}))


def step(shape: dict[str, Any], dtype: str) -> tuple[float, torch.Tensor]:
    """Loss and all gradients of one pass of a model that computes in ``dtype``."""
    model = parallelize(ModelShape(**SHAPE | shape), Mesh.single(), Train(seed=3))[0]
    model.to(getattr(torch, dtype))
    ids = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(1))
    where = torch.arange(20).expand(2, -1), torch.arange(0, 60, 20, dtype=torch.int32)
    loss = F.cross_entropy(
        model(ids, *where)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()
    )
    loss.backward()
    learned = [
        p.grad.float().flatten() for p in model.parameters() if p.grad is not None
    ]
    return loss.item(), torch.cat(learned)


@pytest.mark.parametrize("shape", [
    {}, {"adapter": Adapter(rank=4)}, {"adapter": Adapter(rank=4, kind="dora")}, {"experts": 4, "experts_per_token": 2},
], ids=["dense", "lora", "dora", "experts"])  # fmt: skip
def test_a_model_learns_alike(shape: dict[str, Any], slow: None) -> None:
    """Forward and backward multiply no matrices in 16 bits, and nearly come to float32's numbers."""
    expected, learned = step(shape, "float32")
    with Watched() as watched:
        loss, gradients = step(shape, "bfloat16")
    assert loss == pytest.approx(expected, rel=0.02)
    assert (gradients - learned).norm() < 0.1 * learned.norm()
    assert watched.wide and not watched.narrow


def test_what_has_no_numbers_or_enough_bits_is_multiplied_as_it_is(slow: None) -> None:
    assert is_widened(torch.ones(1, dtype=torch.bfloat16)) and not is_widened(
        torch.ones(1)
    )
    assert not is_widened(torch.ones(1, dtype=torch.bfloat16, device="meta"))


def test_the_note(slow: None) -> None:
    assert (
        "multiplies bfloat16 slowly: products are computed in float32"
        in widened_note("bfloat16", torch.device("cpu"))
    )
    assert not widened_note("float32", torch.device("cpu")) and not widened_note(
        "bfloat16", torch.device("cuda")
    )


@pytest.mark.usefixtures("forked_python")
def test_the_processor_is_asked_by_multiplying() -> None:
    """A mask takes bfloat16 from one that has it; float32 is never wider than itself."""
    assert not multiplies_slowly(torch.float32)
    script = "import torch; from weft.models.widened import multiplies_slowly; print(multiplies_slowly(torch.bfloat16))"
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True
    )
    assert done.stdout == "True\n", done.stderr


def test_a_compiler_is_given_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MULTIPLIED_SLOWLY", {torch.bfloat16})
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(1, 5, 32, generator=drawn).bfloat16().requires_grad_()
    weight = torch.randn(16, 32, generator=drawn).bfloat16().requires_grad_()
    with Watched() as watched:
        (made,) = fused.project(x, weight)
        made.sum().backward()
    assert (
        made.dtype == x.grad.dtype == torch.bfloat16
        and watched.wide
        and not watched.narrow
    )
