"""What blocks save, on the host and in a file: bit-equal, written once, the last blocks kept, faults named."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.cases import Case, start, write_corpus
from tests.prove.test_equality import name, tree
from weft.layout.layout import Layout
from weft.memory import activations, tier_file
from weft.memory.activations import PROFILED, SavedActivations, Timing, bandwidth
from weft.memory.nameless_file import TierError
from weft.memory.offload_profile import MOST_LEAVING, BlockCost, Profile
from weft.memory.tier_file import TierFile
from weft.observe.single_charts import saved_activations
from weft.train.step import clear_gradients, train_step

CPU, ROWS, WIDE = torch.device("cpu"), 64, 32
#: Bytes of a block's input, and of its tanh's result.
NARROW, BROAD = 4 * ROWS * WIDE, 16 * ROWS * WIDE


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


class Widths(nn.Module):
    """A block that saves its input, a view of it, and a wider tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(WIDE, 4 * WIDE, bias=False),
            nn.Linear(4 * WIDE, WIDE, bias=False),
        )

    def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x.flatten(0, 1)))).view_as(x) * shared


class Model:
    """Some blocks in a row, and what their gradients are."""

    def __init__(self, count: int) -> None:
        torch.manual_seed(0)
        self.blocks, self.shared = [Widths() for _ in range(count)], torch.rand(WIDE)

    def forward(
        self, saved: SavedActivations | None, rows: int = ROWS
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = leaf = torch.rand(
            2, rows // 2, WIDE, generator=torch.Generator().manual_seed(1)
        ).requires_grad_()
        shared = self.shared.clone()  # of this pass
        for block in self.blocks:
            if saved is None:
                x = block(x, shared)
            else:
                with saved.block(block, x, shared):
                    x = block(x, shared)
        return leaf, x.square().sum()

    def gradients(
        self, saved: SavedActivations | None = None, rows: int = ROWS
    ) -> list[torch.Tensor]:
        leaf, loss = self.forward(saved, rows)
        loss.backward()
        found = [
            leaf.grad,
            *(p.grad for block in self.blocks for p in block.parameters()),
        ]
        for block in self.blocks:
            block.zero_grad()
        return [g.clone() for g in found if g is not None]


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.fixture(params=["host", "file"])
def place(request: Any, tmp_path: Path) -> TierFile | None:
    return TierFile(tmp_path) if request.param == "file" else None


def settled(saved: SavedActivations) -> None:
    """Let everything that leaves be gone at once."""

    class Now:
        def submit(self, move: Any, urgent: bool = True) -> Any:
            done: Any = tier_file.Future()
            done.set_result(move())
            return done

    saved.rooms.threads = Now()  # type: ignore[assignment]
    if saved.rooms.file is not None:
        saved.rooms.file.threads = Now()  # type: ignore[assignment]


def test_every_storage_leaves_once_and_parameters_stay(place: TierFile | None) -> None:
    model = Model(5)
    plain = model.gradients()
    for blocks, leaving in ((0, 5), (5, 5), (3, 3)):
        saved = SavedActivations(CPU, place, blocks)
        assert same(model.gradients(saved), plain)
        # Per block: its input, whose view costs nothing, and tanh's result; the product with `shared` needs that alone.
        assert saved.sent == leaving * (NARROW + BROAD)
        assert same(model.gradients(saved), plain)


def test_memory_is_free_after_backward_and_little_stays(place: TierFile | None) -> None:
    saved = SavedActivations(CPU, place, 8)
    settled(saved)
    _, loss = Model(10).forward(saved)
    runs = sorted(saved.runs, key=lambda run: run.index)
    one = NARROW + BROAD
    assert [run.here for run in runs] == [0] * 8 + [one] * 2
    del runs
    gc.disable()
    try:
        loss.backward()
        assert (
            saved.here == 0
            and not saved.leaving
            and not [run for run in saved.runs if run.stored]
        )
        assert saved.peak == 2 * one  # of 10
    finally:
        gc.enable()


def test_room_is_used_again_whatever_the_sizes(tmp_path: Path) -> None:
    file, model = TierFile(tmp_path), Model(4)
    saved = SavedActivations(CPU, file, 4)
    model.gradients(saved, rows=96)
    size = file.size
    for rows in (96, 64, 80, 96, 70):
        assert same(model.gradients(saved, rows), model.gradients(rows=rows))
    assert file.size == size <= 4 * 4 * 96 * WIDE * 5
    assert saved.rooms.free == sorted(saved.rooms.free, key=lambda room: room.size)


def test_what_is_on_its_way_is_taken_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does not write until backward has passed: the last that leave are forwarded, and not read."""
    go, write = threading.Event(), os.pwritev

    def slow(*arguments: Any) -> int:
        go.wait(20)
        return write(*arguments)

    model = Model(3)
    plain = model.gradients()
    file = TierFile(tmp_path)
    saved = SavedActivations(CPU, file, MOST_LEAVING)
    monkeypatch.setattr(tier_file.os, "pwritev", slow)
    leaf, loss = model.forward(saved)
    # room is given back when a write that has begun ends
    threading.Timer(0.5, go.set).start()
    loss.backward()
    assert (
        leaf.grad is not None
        and torch.equal(leaf.grad, plain[0])
        and not file.bytes["read"]
    )
    monkeypatch.undo()
    for block in model.blocks:
        block.zero_grad()
    assert same(model.gradients(saved), plain)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_an_io_error_names_the_folder(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> int:
        raise OSError(5, "Input/output error")

    model, saved = Model(6), SavedActivations(CPU, TierFile(tmp_path), 5)
    settled_plain = model.gradients()
    monkeypatch.setattr(tier_file.os, call, broken)
    with pytest.raises(
        TierError,
        match=rf"{'writ' if call == 'pwritev' else 'read'}ing .*{tmp_path}.*Input/output",
    ):
        model.gradients(saved)
    monkeypatch.undo()
    for block in model.blocks:
        block.zero_grad()
    assert same(model.gradients(saved), settled_plain)


def interrupted(values: dict[str, Any], call: str) -> tuple[str, bool, bool]:
    """What a step that the disk breaks in the middle says; whether the state is as before, and goes on as if not."""
    _, mesh, model, state, loader = start(values)
    batches = loader.step(0) or []

    def bits() -> dict[str, torch.Tensor]:
        return {name: tensor.values.clone() for name, tensor in state.tensors().items()}

    train_step(model, state, batches, mesh, lr=1e-2, clip=1.0)
    before, calls, real = bits(), iter(range(99)), getattr(os, call)

    def broken(*arguments: Any) -> int:
        if next(calls) > 3:
            raise OSError(5, "Input/output error")
        return int(real(*arguments))

    said = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier_file.os, call, broken)
        try:
            train_step(model, state, batches, mesh, lr=1e-2, clip=1.0)
        except TierError as error:
            said = str(error)
    after = bits()
    clear_gradients(model, state)
    train_step(model, state, batches, mesh, lr=1e-2, clip=1.0)
    again = bits()
    _, mesh, model, state, loader = start(values | {"memory": {}})
    for _ in range(2):
        train_step(model, state, batches, mesh, lr=1e-2, clip=1.0)
    whole = bits()
    return said, *(
        all(torch.equal(a[n], b[n]) for n in a)
        for a, b in ((before, after), (again, whole))
    )


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_step_that_the_disk_breaks_changes_nothing(
    pool: Any, corpus: str, call: str, tmp_path: Path
) -> None:
    values = tree(corpus, {"layout": {}})
    values["model"]["layers"], values["data"]["seq_len"] = 5, 65
    values["memory"] = {"activations": "file", "blocks": 4, "folder": str(tmp_path)}
    said, unchanged, goes_on = pool.run(1, interrupted, values, call)[0]
    assert (
        str(tmp_path) in said and "Input/output error" in said and unchanged and goes_on
    )


def test_a_change_in_place_is_noticed() -> None:
    saved, x = SavedActivations(CPU), torch.rand(ROWS, WIDE, requires_grad=True)

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(x * 1)
            y.mul_(2)
            return y

    with (
        pytest.raises(AssertionError, match="changed in place"),
        saved.block(module := Doubled(), x),
    ):
        module(x)


def states(values: dict[str, Any], folder: str) -> tuple[bool, list[int], list[int]]:
    """Whether all of a rank's state is the same to the last bit, kept or moved; bytes to and from the file, in turn."""
    found, moved = [], []
    for place, blocks in (("device", 0), ("file", 9), ("file", 0), ("host", 2)):
        values["memory"] = {"activations": place, "blocks": blocks, "folder": folder}
        _, mesh, model, state, loader = start(values)
        for step in range(2):
            train_step(
                model,
                state,
                loader.step(step * values["train"]["batch"]) or [],
                mesh,
                lr=1e-2,
                clip=1.0,
            )
        found.append(
            {name: tensor.values.clone() for name, tensor in state.tensors().items()}
        )
        if place == "file":
            moved.append(model.hooks.saver.rooms.file.bytes)
    plain = found.pop(0)
    same = all(torch.equal(one[name], plain[name]) for one in found for name in plain)
    return same, [one["written"] for one in moved], [one["read"] for one in moved]


QUICK: tuple[Case, ...] = (
    {"layout": {"shard": 2}, "recompute": "full"},
    {"layout": {"pp": 2}, "micro_batch": 1},
)
SLOW: tuple[Case, ...] = (
    {"layout": {"dp": 2, "shard": 2}, "micro_batch": 1},
    {"layout": {"cp": 2, "tp": 2}, "context": "zigzag", "tied": True},
    {
        "layout": {"pp": 2, "virtual": 2, "schedule": "interleaved-1f1b", "shard": 2},
        "micro_batch": 1,
    },
    {"layout": {"pp": 2, "schedule": "zb-h1"}, "micro_batch": 1, "recompute": "full"},
    {"layout": {"shard": 2, "ep": 2}, "experts": 4},
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda case: name(case).replace("/", "_"),
)
def test_bits_are_those_of_keeping(
    pool: Any, corpus: str, case: Case, tmp_path: Path
) -> None:
    values = tree(corpus, case)
    values["model"] |= {"layers": 4} | {
        key: case[key] for key in ("experts",) if key in case
    }
    values["data"] |= {"seq_len": 65}  # what is smaller than a page stays
    values["train"]["batch"] = 4
    found = pool.run(Layout(**case["layout"]).world, states, values, str(tmp_path))
    assert all(same and min(written) > 0 for same, written, _ in found)
    # a last stage's few blocks are wanted before they are gone
    assert sum(read[0] for *_, read in found)


# --- how much


def profile(
    write: float,
    read: float,
    count: int = 12,
    forward: float = 1.0,
    backward: float = 2.0,
) -> Profile:
    return Profile([BlockCost(forward, backward, 100, 20)] * count, write, read)


def test_amount_by_hand() -> None:
    fast = profile(1e9, 1e9)
    assert fast.offloaded(0) == (0, 1200, 36.0) and fast.most_hidden() == 11
    assert fast.offloaded(11).bytes == 200 and fast.offloaded(
        11
    ).seconds == pytest.approx(36)
    # A block's bytes take 1.5 of its backward to come back: 12 x 2 s of backward less the first one's hold 7 of 3 s.
    assert profile(1e9, 100 / 3).most_hidden() == 7
    # And 2 s to leave: in 12 s of forward five do, beside the two that may be on their way at the end.
    assert profile(50, 1e9).most_hidden() == 7 and profile(50, 1e9).offloaded(7) == (
        7,
        700,
        36.0,
    )
    assert profile(50, 1e9).offloaded(8).seconds == 38
    assert profile(1e-3, 1e-3).offloaded(12).seconds > 1e5
    # what is forwarded never has to arrive
    assert profile(1e-3, 1e-3).most_hidden() == 2


def test_what_moves_beside_compute_slows_it_down() -> None:
    """Of a second for 100 bytes there and back a twelfth of a block's three: 3 % of 36 s are 4 blocks' quarter."""
    dragging = replace(profile(1e9, 1e9), write_drag=0.1 / 100, read_drag=0.15 / 100)
    assert dragging.offloaded(0).seconds == 36
    assert dragging.offloaded(4).seconds == pytest.approx(37)
    assert dragging.most_hidden() == 4


def test_curve_keeps_recomputes_and_offloads() -> None:
    found = profile(1e9, 1e9, count=4).curve()
    assert found["offload"][0] == found["recompute"][0] == (0, 400, 12.0)
    assert found["recompute"][4] == (4, 4 * 20 + 80, 16.0)
    assert [choice.blocks for choice in found["offload"]] == [0, 1, 2, 3]
    # recomputes already
    assert "recompute" not in Profile([BlockCost(1, 2, 20, 20)] * 3, 1.0, 1.0).curve()


def test_the_report_shows_the_curve() -> None:
    found = profile(1e9, 1e9, count=4)
    (chart,) = saved_activations(
        [{"blocks": 3, "of": 4, "place": "file", **found.curve()}]
    )
    offload, recompute = chart["traces"]
    assert (
        offload["x"][0] == recompute["x"][0] == 400 / 2**30
        and offload["y"] == (12.0,) * 4
    )
    assert (
        recompute["text"][4] == "4 of 4 blocks"
        and "3 leave for the file" in chart["note"]
    )
    assert saved_activations([]) == []


def test_bandwidth_counts_what_overlaps_once() -> None:
    assert bandwidth([(0, 2, 100), (1, 3, 100), (5, 6, 200)]) == 100
    assert bandwidth([]) > 1e100


def test_amount_is_chosen_after_some_passes_and_reported(
    place: TierFile | None,
) -> None:
    model, found = Model(6), []
    saved = SavedActivations(CPU, place)
    saved.report = found.append
    plain = model.gradients()
    for _ in range(2 * PROFILED):
        assert saved.away is None
        assert same(model.gradients(saved), plain)
    assert same(model.gradients(saved), plain)
    (said,) = found
    assert (
        said["of"] == 6
        and said["blocks"] == saved.away <= 5
        and said["write"] > 0 < said["read"]
    )
    assert (
        said["offload"][0].bytes == 6 * (NARROW + BROAD) and len(said["recompute"]) == 7
    )
    sent = saved.sent
    model.gradients(saved)
    assert saved.sent - sent == saved.away * (NARROW + BROAD)


def test_passes_that_keep_show_what_moving_costs() -> None:
    """Blocks take 1 s and 2 s alone, and 1.1 and 2.2 while all that they save moves at no other cost."""
    saved = SavedActivations(CPU)
    for leaves, slower in ((True, 1.1), (False, 1.0)):
        for index in range(12):
            timing = Timing([0.0, slower, 5.0, 5.0 + 2 * slower], saved=100, inputs=20)
            saved.timings[leaves][index] = [timing] * PROFILED
    saved.moved = {True: [(0.0, 1e-6, 1200)], False: [(0.0, 1e-6, 1200)]}
    found = saved.profile()
    assert found.write_drag == pytest.approx(1e-3) and found.read_drag == pytest.approx(
        2e-3
    )
    assert found.offloaded(0).seconds == 36 and found.most_hidden() == 3, (
        "3 % of 36 s are those of 3 blocks"
    )
    saved.timings[False].clear()
    assert saved.profile().most_hidden() == 11, "what cannot be seen costs nothing"


def test_nothing_is_kept_for_the_profile_without_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        activations.psutil, "virtual_memory", lambda: SimpleNamespace(available=0)
    )
    model, saved = Model(6), SavedActivations(CPU)
    for _ in range(PROFILED):
        assert saved.away is None
        before = saved.sent
        model.gradients(saved)
        assert saved.sent - before == 6 * (NARROW + BROAD)
    model.gradients(saved)
    assert saved.away is not None


def test_predicted_peak_is_the_one_that_is(place: TierFile | None) -> None:
    for away in (0, 3, 9):
        saved = SavedActivations(CPU, place, away or 99)
        if not away:
            saved.away = 0
        settled(saved)
        Model(10).gradients(saved)
        one = NARROW + BROAD
        instant = Profile(
            [BlockCost(1.0, 2.0, one, NARROW)] * 10, float("inf"), float("inf")
        )
        assert saved.peak == instant.offloaded(away).bytes
