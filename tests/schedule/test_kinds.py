"""A kind that only this file knows goes through every room: built, validated, lowered, simulated, drawn, executed."""

import json
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

from bench.modelled import replay
from weft.prove.pool import ProcessPool
from weft.schedule import draw
from weft.schedule.actions import (
    LOCAL,
    Action,
    ScheduleError,
    Table,
    Value,
    assemble,
    forward_half,
)
from weft.schedule.build import build
from weft.schedule.execute import execute
from weft.schedule.kinds import KINDS, Clock, Duty, Flow, Kind, Visit, declare_kind
from weft.schedule.pipeline_wire import Wire
from weft.schedule.simulate import Costs, by_kind, simulate
from weft.schedule.times import ModelTimes, Times
from weft.schedule.validate import validate

RANKS, COUNT = 2, 4


def _half(at: Visit) -> Flow:
    """The first half of a forward hands what it has to an exchange."""
    return Flow(() if at.before is None else (Value("act", at.before, at.microbatch),),
                (Value("dispatched", at.stage, at.microbatch),))  # fmt: skip


def _exchange(at: Visit) -> Flow:
    return Flow(
        (Value("dispatched", at.stage, at.microbatch),),
        (Value("combined", at.stage, at.microbatch),),
    )


def _rest(at: Visit) -> Flow:
    sent = () if at.after is None else (Value("act", at.stage, at.microbatch),)
    return Flow(
        (Value("combined", at.stage, at.microbatch),),
        (*sent, Value("saved", at.stage, at.microbatch)),
    )


HALF = declare_kind(Kind("test-half", "attention", forward=True, flow=_half,
                    cost=lambda a, times: times.stage(a.stage).forward / 2))  # fmt: skip
EXCHANGE = declare_kind(Kind("test-exchange", "all-to-all", "#123456", forward=True, flow=_exchange, parameters=False,
                        clock=Clock.COMMUNICATION, cost=lambda a, times: 0.75))  # fmt: skip
REST = declare_kind(Kind("test-rest", "experts", duty=Duty.FORWARD, forward=True, flow=_rest,
                    cost=lambda a, times: times.stage(a.stage).forward / 2))  # fmt: skip
BACK = declare_kind(
    Kind("test-back", "backward and update", duty=Duty.BACKWARD, flow=KINDS["B"].flow)
)

COSTS = Costs(
    by_kind(ModelTimes([Times(2.0, 1.0, 1.0)] * RANKS)),
    size=lambda value: float(value.name in LOCAL),
)


def table() -> Table:
    """Two microbatches at a time: the exchange of one runs beside the other's halves."""
    orders = []
    for rank in range(RANKS):
        order = []
        for pair in range(0, COUNT, 2):
            order += [
                (kind, rank, pair + i)
                for kind in (HALF, EXCHANGE, REST)
                for i in (0, 1)
            ]
        orders.append(order + [(BACK, rank, m) for m in range(COUNT)])
    return assemble("two-batch", orders, RANKS, [range(RANKS)] * COUNT)


def test_it_is_validated_and_lowered() -> None:
    lowered = validate(table(), zero=2)
    kinds = [a.kind for a in lowered.ranks[0]]
    # gradients are left by BACK alone
    assert kinds.count("REDUCE") == COUNT and kinds.count("GATHER") == 1
    assert kinds.count("SEND") == kinds.count("RECV") == COUNT
    without = [tuple(a for a in actions if a.kind != REST) for actions in table().ranks]
    with pytest.raises(ScheduleError, match=r"stage 0 runs test-back for microbatch 0"):
        validate(Table("half", tuple(without), RANKS, table().paths))
    doubled = build("1f1b", RANKS, COUNT)
    extra = Action(0, REST, 0, 0, reads=(), writes=())
    with pytest.raises(
        ScheduleError, match="stage 0 runs F, B, test-rest for microbatch 0"
    ):
        validate(
            Table(
                "twice",
                ((*doubled.ranks[0], extra), doubled.ranks[1]),
                RANKS,
                doubled.paths,
            )
        )
    assert {a.kind for a in forward_half(table())} == {HALF, EXCHANGE, REST}


def test_its_stream_runs_beside_compute() -> None:
    found = simulate(table(), COSTS)
    # Both halves of a pair take 1 each, so that each exchange but the last is hidden behind another microbatch.
    first = {
        (t.action.kind, t.action.microbatch): (t.start, t.end)
        for t in found.timeline[0] + found.beside[0]
    }
    assert (
        first[HALF, 0] == (0, 1)
        and first[EXCHANGE, 0] == (1, 1.75)
        and first[HALF, 1] == (1, 2)
    )
    assert (
        first[REST, 0] == (2, 3)
        and first[EXCHANGE, 1] == (2, 2.75)
        and first[REST, 1] == (3, 4)
    )
    assert found.busy == (4 * COUNT, 4 * COUNT)  # of what computes
    one_by_one = Costs(
        lambda a: (
            COSTS.compute(a) + (a.kind == REST) * 0.75 - (a.kind == EXCHANGE) * 0.75
        )
    )
    assert found.makespan < simulate(table(), one_by_one).makespan
    behind = [
        tuple(sorted(actions, key=lambda a: a.kind != BACK))
        for actions in table().ranks
    ]
    with pytest.raises(ScheduleError, match=r"test-back\(0,0\) on rank 0 comes before"):
        simulate(Table("backward first", tuple(behind), RANKS, table().paths), COSTS)


def test_it_is_drawn() -> None:
    found = simulate(table(), COSTS)
    assert draw.colours(table())[EXCHANGE] == "#123456"
    picture = ElementTree.fromstring(draw.svg(found))
    labels = {element.text for element in picture.iter() if element.text}
    assert {"test-exchange  all-to-all", "test-half  attention"} <= labels
    boxes = [g for g in picture.iter() if (g.get("class") or "").startswith("a ")]
    assert len(boxes) == 4 * COUNT * RANKS
    tall = {float(box[0].get("height", "0")) for box in boxes}
    assert len(tall) == 2  # what runs beside compute is a strip under it
    assert "test-exchange" in draw.html(found)
    tracks = {
        e["args"]["name"]
        for e in draw.perfetto(found)["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert "rank 1, communication" in tracks
    json.dumps(draw.perfetto(found))


def operations() -> dict[str, Any]:
    """Numbers that show who has worked on them: every stage adds one per kind."""

    def forward(a: Action, reads: Any) -> list[Any]:
        value = sum(reads, torch.zeros(1)) + 10.0 ** (HALF, EXCHANGE, REST).index(
            a.kind
        ) * (1 if a.writes else 0)
        return [value for _ in a.writes]

    def back(a: Action, reads: Any) -> list[Any]:
        return (
            [sum(reads) for _ in a.writes]
            or seen.append((a.microbatch, float(sum(reads))))
            or []
        )

    seen: list[tuple[int, float]] = []
    return {HALF: forward, EXCHANGE: forward, REST: forward, BACK: back, "seen": seen}


def on_rank() -> list[tuple[int, float]]:
    ops = operations()
    seen = ops.pop("seen")
    wire = Wire(
        dist.group.WORLD,
        torch.device("cpu"),
        spec=lambda value: [((1,), torch.float32)],
    )
    execute(validate(table()), dist.get_rank(), ops, wire)
    return seen


def test_it_is_executed_as_it_is_replayed(pool: ProcessPool) -> None:
    ops = operations()
    seen = ops.pop("seen")
    replay(table(), ops)
    # Stage 0 saves 111, stage 1 saves 222, and both are added up on the way back.
    assert sorted(seen) == [(m, 333.0) for m in range(COUNT)]
    assert pool.run(RANKS, on_rank)[0] == seen


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="kind 'F' is declared already"):
        declare_kind(Kind("F"))
