"""Zeroth-order steps in pairs of ranks, one at each point: equal to one device, with six numbers exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cases import Case, recipe, start, write_corpus
from tests.prove.test_equality import difference
from weft.layout.dims import Dim
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.memory.noise import normal
from weft.parallel.state import Held
from weft.recipe import Recipe
from weft.rehearse.ledger import AllocationWatch, Ledger, tensors_in
from weft.techniques.phases.zeroth_order import two_points
from weft.train.build_step import build_step
from weft.train.rules.rank_sums import logical_positions
from weft.train.step import StepContext

LAYOUTS: list[Case] = [
    {"dp": 2},
    {"dp": 2, "tp": 2},
    {"dp": 2, "shard": 2},
    {"dp": 4},
    {"dp": 2, "pp": 2},
]
QUICK = 2


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def paired(corpus: str, layout: Case, pairs: bool = True, **change: Any) -> Recipe:
    axes = {f"layout__{axis}": size for axis, size in layout.items()}
    way = {
        "optimizer__estimate": "zeroth-order",
        "optimizer__kind": "sgd",
        "optimizer__pairs": pairs,
    }
    return recipe(corpus, **axes, **way, **change)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", [
    pytest.param(v, id=str(Layout(**v)), marks=[pytest.mark.slow] * (i >= QUICK)) for i, v in enumerate(LAYOUTS)
])  # fmt: skip
def test_equal_to_one_device(pool: Any, corpus: str, layout: Case) -> None:
    settings = paired(corpus, layout, train__micro_batch=2)
    found = pool.run(
        settings.layout.world, difference, settings.model_dump(mode="json")
    )[0]
    assert found.ok, found


def group_in(value: Any) -> dist.ProcessGroup | None:
    """The process group that this argument of a collective names, if it names one."""
    if isinstance(value, str) and value not in ("sum", "avg", "max", "min"):
        return dist.distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]
    try:
        return (
            dist.ProcessGroup.unbox(value)
            if isinstance(value, torch.ScriptObject)
            else None
        )
    except (RuntimeError, TypeError):
        return None


class Sent(TorchDispatchMode):
    """The bytes of every collective among several ranks, and how often the model is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []
        self.losses = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if "c10d" in func.namespace and name not in (
            "wait_tensor",
            "_wrap_tensor_autograd",
        ):
            group = next((g for a in args if (g := group_in(a)) is not None), None)
            sizes = [t.nbytes for t in tensors_in(args)]
            if sizes and (group is None or dist.get_world_size(group) > 1):
                self.bytes.append(max(sizes))
        self.losses += name == "amax"  # of every chunk of logits
        return func(*args, **(kwargs or {}))


def counted(values: dict[str, Any]) -> tuple[list[int], int, int]:
    settings, mesh, model, state, loader = start(values)
    stepper, batches = (
        build_step(StepContext(model, state, mesh), settings),
        loader.step(0),
    )
    with Sent() as sent:
        result = stepper.take(batches or [], 1e-6)[0]
    return sent.bytes, sent.losses, result.tokens


def test_six_numbers_are_exchanged_and_half_is_evaluated(
    pool: Any, corpus: str
) -> None:
    change = {"train__batch": 4, "train__loss_chunk": 4096, "train__micro_batch": 1}
    alone = pool.run(1, counted, paired(corpus, {}, **change).model_dump(mode="json"))[
        0
    ]
    for pairs in (True, False):
        values = paired(corpus, {"dp": 2}, pairs, **change).model_dump(mode="json")
        for sent, losses, tokens in pool.run(2, counted, values):
            # one message: losses and weights at both points, tokens, stops
            assert sent == [6 * 8]
            # of one point the four rows, or of both points two
            assert losses == alone[1] // 2 == 4
            assert tokens == alone[2]
    assert alone[0] == []


def test_directions_take_little_room() -> None:
    """The random direction of a large table is made some rows at a time, and equal to the whole one's."""
    parameter, mesh = torch.nn.Parameter(torch.zeros(3000, 1000)), Mesh.single()
    logical = mesh.place.logical([Dim("a", 3000), Dim("b", 1000)], 0.1)
    held = Held(
        "table", logical, mesh.place.hold(logical), parameter.detach(), parameter
    )
    ledger = Ledger()
    with AllocationWatch(ledger):
        found = two_points.direction(held, 5)
    assert ledger.peak < 4 * 3_000_000 + 150 * two_points.ROWS_OF
    seed = two_points.crc32(b"table") << 32 | 5
    assert torch.equal(found, normal(logical_positions(held), seed, torch.float32))
