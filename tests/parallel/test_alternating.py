"""Updates on the host and on the device by turns: the same bits, in the order of the table, and how many go where."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.cases import recipe, write_corpus
from tests.memory.test_tiers import run
from weft.errors import UsageError
from weft.layout.dims import Tensor
from weft.layout.parts import Part
from weft.memory.tier_file import PAGE, BufferPool
from weft.parallel.alternating import (
    PROFILED,
    Alternating,
    UnitUpdate,
    pin_slots,
    update_alternating,
)
from weft.parallel.state import State
from weft.schedule.actions import Action
from weft.schedule.alternate import (
    BRING,
    ON_DEVICE,
    ON_HOST,
    RETURN,
    ROOMS,
    simulated,
    splits,
    update_table,
)
from weft.schedule.draw import svg
from weft.techniques.phases.alternating_updates import alternation

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", [
    {"train__dtype": "float32", "train__micro_batch": 1, "optimizer__clip": 0.1},
    {"optimizer__kind": "muon", "optimizer__ema": 0.9},
    {"optimizer__state": "4bit", "model__ffn": 42, "train__freeze": ["norm.*", "blocks.0.*"]},
    {"optimizer__kind": "natural-galore", "optimizer__rank": 3},
    {"optimizer__kind": "lion", "adapter__rank": 2},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("share", [1.0, 0.5, 0.3, "auto"])
def test_no_bit_depends_on_where_a_unit_is_updated(
    corpus: str, share: float | str, change: dict[str, Any]
) -> None:
    plain, resident = run(corpus, {}, 5, **change)
    memory: Any = {"weights": "host", "alternate": share}
    shares: list[float | None] = []

    class Watched(Alternating):
        def __call__(self, units: Any, update: Any) -> None:
            super().__call__(units, update)
            shares.append(self.share)

    with mock.patch.object(alternation, "Alternating", Watched):
        found, state = run(corpus, memory, 5, **change)
    assert [r[:4] for r in found] == [r[:4] for r in plain]
    wanted = resident.tensors()
    for name, part in state.tensors().items():
        assert torch.equal(part.values, wanted[name].values), name
    assert len(shares) == 5 and (shares[-1] == share or share == "auto")


def test_units_are_updated_where_and_when_the_table_says(corpus: str) -> None:
    """One of two on the device, beside the host's, and no more are there than there is room for."""
    seen: list[tuple[str, int, int]] = []
    there, most = set[int](), [0]

    def watched(a: Action, work: Any) -> None:
        there.update([a.stage] if a.kind == BRING else [])
        most[0] = max(most[0], len(there))
        work()
        there.difference_update([a.stage] if a.kind == RETURN else [])
        seen.append((a.kind, a.stage, threading.get_ident()))

    memory: Any = {"weights": "host", "alternate": 0.5}
    _, state = run(corpus, memory, 0, model__layers=9)
    alternating = Alternating(CPU, 0.5)
    alternating.wrap = watched
    grads = {h.name: torch.ones_like(h.local) for h in state.learning}
    update_alternating(state, alternating, lambda unit: grads, 1e-3)
    assert [unit for kind, unit, _ in seen if kind == ON_HOST] == [0, 2, 4, 6, 8]
    assert [unit for kind, unit, _ in seen if kind == RETURN] == [1, 3, 5, 7, 9]
    main = threading.get_ident()
    assert all((thread == main) == (kind == ON_HOST) for kind, _, thread in seen)
    assert len({thread for *_, thread in seen}) == 4 and most[0] <= ROOMS


def test_slots_move_into_buffers_that_a_driver_can_pin_and_only_once() -> None:
    """Only a CUDA device asks for it, and its driver pins; where slots go and what they hold shows without them."""
    values = torch.arange(6.0)
    part = Part(values, ((0, 6),), Tensor((6,), "F32"))
    held: Any = SimpleNamespace(slots={"exp_avg": part})
    pin_slots([UnitUpdate([held], [])], BufferPool())
    assert part.values is values and values.tolist() == [0, 1, 2, 3, 4, 5]
    there = values.data_ptr()
    assert there % PAGE == 0
    with mock.patch.object(torch.Tensor, "is_pinned", return_value=True):
        pin_slots([UnitUpdate([held], [])], BufferPool())
    assert values.data_ptr() == there


def test_an_update_that_fails_is_raised_and_nobody_saves_what_is_left(
    corpus: str,
) -> None:
    states: list[State] = []
    memory: Any = {"weights": "host", "alternate": 0.5}

    def failing(a: Action, work: Any) -> None:
        if a.kind == RETURN and a.stage:
            raise OSError("the device is lost")
        work()

    _, state = run(corpus, memory, 1, states)
    alternating = Alternating(CPU, 0.5)
    alternating.wrap = failing
    grads = {h.name: torch.ones_like(h.local) for h in state.learning}
    with pytest.raises(OSError, match="the device is lost"):
        update_alternating(state, alternating, lambda unit: grads, 1e-3)
    with pytest.raises(OSError, match="the device is lost"):
        state.tensors()


# --- how many


@pytest.mark.parametrize("link", [0.25, 0.5, 1.0, 2.0, 6.0, 1e6])
def test_as_many_go_to_the_device_as_travel_while_the_host_updates(link: float) -> None:
    """Where a unit travels as long as the host updates ``link`` of them, one in ``link + 1`` goes: the notes' rule."""
    units = 84
    found = splits(
        [1] * units, {ON_HOST: 1.0, ON_DEVICE: 0.01, BRING: link, RETURN: link}
    )
    assert abs(found[0].device - units / (1 + link)) <= 2
    assert found[0].seconds == pytest.approx(
        units * link / (1 + link), abs=2.5 * min(link, 1)
    )


def test_the_table_is_drawn_and_has_room_for_three() -> None:
    simulation = simulated(
        8, [1] * 8, {ON_HOST: 1.0, ON_DEVICE: 1.0, BRING: 1.0, RETURN: 5.0}
    )
    begun = {
        t.action.key: t.start
        for lane in (*simulation.timeline, *simulation.beside)
        for t in lane
    }
    ended = {
        t.action.key: t.end
        for lane in (*simulation.timeline, *simulation.beside)
        for t in lane
    }
    for unit in range(ROOMS, 8):
        assert begun[(BRING, unit, 0)] >= ended[(RETURN, unit - ROOMS, 0)]  # type: ignore[index]
    assert simulation.elapsed == 2 + 8 * 5.0
    assert "<svg" in svg(simulation)
    assert not [a for a in update_table(4, count=0) if a.kind != ON_HOST]


def test_the_share_is_that_of_measured_rates(corpus: str) -> None:
    """Of sides and links that are as slow as they are told to be."""
    pace = {ON_HOST: 2e-7, ON_DEVICE: 2e-8, BRING: 4e-7, RETURN: 4e-7}
    found: list[dict[str, Any]] = []

    def paced(a: Action, work: Any) -> None:
        work()
        time.sleep(pace[a.kind] * sizes[a.stage])

    memory: Any = {"weights": "host", "alternate": "auto"}
    _, state = run(corpus, memory, 0, model__layers=8)
    alternating = Alternating(CPU, "auto", found.append)
    alternating.wrap = paced
    grads = {h.name: torch.ones_like(h.local) for h in state.learning}
    units = [[h for h in unit.held if h.learns] for unit in state.units]
    sizes = [UnitUpdate(held, [grads[h.name] for h in held]).size for held in units]
    for _ in range(PROFILED + 1):
        update_alternating(state, alternating, lambda unit: grads, 1e-3)
    wanted = splits(sizes, pace)[0].device
    assert 0 < wanted < len(sizes) - 1 and abs(found[0]["device"] - wanted) <= 1, found
    assert alternating.share == found[0]["device"] / len(sizes)


def test_words(corpus: str) -> None:
    assert (
        recipe(
            corpus, memory__weights="host", memory__alternate="auto"
        ).memory.alternate
        == "auto"
    )
    with pytest.raises(UsageError, match=r"memory.alternate = 1\.5"):
        recipe(corpus, memory__weights="host", memory__alternate=1.5)
