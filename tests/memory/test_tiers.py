"""Tiers: what goes to a file comes back, room is what is needed, and a disk that fails is named."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.cases import recipe, write_corpus
from weft.checkpoint.staging import WriterProcess
from weft.layout.mesh import Mesh
from weft.memory import pinned, resting, tier_file
from weft.memory.nameless_file import TierError
from weft.memory.resting import RestingGroup, ReturnCopy, Tiers
from weft.memory.tier_file import (
    COMMON,
    PAGE,
    PIECE,
    SMALL,
    THREADS,
    BufferPool,
    TierFile,
    page_buffer,
    whole_pages,
)  # fmt: skip
from weft.memory.transfer_threads import Threads
from weft.parallel.state import State
from weft.parallel.units import TableUnit
from weft.train.build_step import build_step
from weft.train.setup import build_for_training, prepare
from weft.train.step import StepContext

EVERYTHING = {"weights": "file", "gradients": "file", "moments": "file"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


# --- the host


class LateCopy(ReturnCopy):
    """A copy that ends no earlier than somebody waits for it, as one on a CUDA stream may."""

    def __init__(self, there: torch.Tensor, home: torch.Tensor) -> None:
        self.there, self.home = there, home

    def wait(self) -> None:
        self.home.copy_(self.there)


def test_tensors_are_used_again_only_when_they_are_back_from_the_device() -> None:
    values = torch.zeros(4)
    group = RestingGroup([values], None, BufferPool())
    with mock.patch.object(resting, "ReturnCopy", LateCopy):
        for step in range(2):
            group.bring()
            assert values.tolist() == [step] * 4
            # what a device other than the CPU has
            group.there = group.home.clone()
            group._refer_to(group.there)
            values += 1
            group.put(changed=True)
            assert values.tolist() == [step] * 4, "training waited for the way back"
        group.settle()
    assert values.tolist() == [2] * 4


# --- the file


def test_a_region_is_a_file_and_memory(tmp_path: Path) -> None:
    """What transfers write the memory shows, and the other way round; nothing has a name."""
    file = TierFile(tmp_path / "tier")
    first, region = file.region(5), file.region(3 * PIECE + 17)
    assert not list((tmp_path / "tier").iterdir()) and first.size == PAGE
    data, back = page_buffer(region.size), page_buffer(region.size)
    assert not data.data_ptr() % PAGE and not region.memory.any()
    data.copy_(torch.randint(0, 256, data.shape, dtype=torch.uint8))
    region.write(data).wait()
    assert torch.equal(region.memory, data) and not first.memory.any()
    region.forget_sums()
    region.memory[PIECE + 3] ^= 1
    region.read(back).wait()
    assert torch.equal(region.memory, back) and not torch.equal(back, data)
    part = page_buffer(PAGE)
    region.read(part, start=PIECE).wait()
    assert torch.equal(part, back[PIECE : PIECE + PAGE])
    assert file.bytes == {"written": data.numel(), "read": back.numel() + PAGE}


@pytest.mark.parametrize(
    "size",
    [
        PAGE,
        SMALL,
        SMALL + PAGE,
        3 * SMALL + PAGE,
        2 * PIECE,
        2 * PIECE + PAGE,
        5 * PIECE,
    ],
)
def test_a_transfer_is_shared_by_the_threads(tmp_path: Path, size: int) -> None:
    """What is less than a piece for each comes in equal parts, and soonest; all of it comes once, and is compared."""
    region, data, back = (
        TierFile(tmp_path).region(size),
        page_buffer(size),
        page_buffer(size),
    )
    data.copy_(torch.randint(0, 256, data.shape, dtype=torch.uint8))
    region.write(data).wait()
    coming = region.read(back)
    coming.wait()
    assert torch.equal(back, data)
    few = min(THREADS, -(-size // SMALL))
    assert len(coming.pieces) == max(few, -(-size // PIECE))
    region.memory[size - 1] ^= 1
    with pytest.raises(TierError, match="damaged"):
        region.read(back).wait()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = TierFile(tmp_path)
    region, data = file.region(2 * PIECE), page_buffer(2 * PIECE)
    region.write(data).wait()
    region.memory[PIECE + 9] = 1
    with pytest.raises(
        TierError,
        match=rf"memory.folder = '{tmp_path}' failed: .* at {PIECE:,} .* damaged",
    ):
        region.read(data).wait()


def test_a_disk_that_does_not_answer_keeps_no_process(tmp_path: Path) -> None:
    """One that is no rank among others ends its threads by itself, and waited for the one that waits for the disk."""
    code = f"""
import os, sys, time
from pathlib import Path
from weft.memory.nameless_file import TierError
from weft.memory.tier_file import PAGE, TierFile, page_buffer
from weft.run.failure import report_failure
os.preadv = lambda *ask: time.sleep(300)
try:
    TierFile(Path({str(tmp_path)!r}), timeout=0.2).region(PAGE).read(page_buffer(PAGE)).wait()
except TierError as error:
    sys.exit(report_failure(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100
    )
    assert (
        done.returncode == 1
        and "has taken 0.2 s: the disk does not answer" in done.stderr
    ), done


def test_a_system_that_does_less_is_asked_again(tmp_path: Path) -> None:
    file = TierFile(tmp_path)
    region, data, back = file.region(PIECE), page_buffer(PIECE), page_buffer(PIECE)
    data.copy_(torch.randint(0, 256, data.shape, dtype=torch.uint8))

    def shortened(call: Callable[..., int]) -> Callable[..., int]:
        return lambda descriptor, parts, offset: call(
            descriptor, [parts[0][: 3 * PAGE]], offset
        )

    with mock.patch.multiple(
        os, preadv=shortened(os.preadv), pwritev=shortened(os.pwritev)
    ):
        region.write(data).wait()
        region.read(back).wait()
    assert torch.equal(data, back)
    with (
        mock.patch.object(os, "preadv", return_value=0),
        pytest.raises(TierError, match="the file ends at 0"),
    ):
        region.read(back).wait()


def test_what_is_urgent_goes_first() -> None:
    """Each kind in its order; what fails, or is not wanted any more, keeps no other from being made."""
    threads, gate, made = Threads(1, "test"), Event(), list[int]()

    def fails() -> None:
        raise OSError(5, "Input/output error")

    first = threads.submit(lambda: made.append(int(gate.wait(10))))
    later = [threads.submit(partial(made.append, i), urgent=False) for i in (2, 3, 4)]
    bad, soon = (
        threads.submit(fails),
        [threads.submit(partial(made.append, i)) for i in (10, 11)],
    )
    assert later[1].cancel()
    gate.set()
    with pytest.raises(OSError, match="Input/output"):
        bad.result(10)
    for one in (first, *soon, later[0], later[2]):
        one.result(10)
    assert made == [1, 10, 11, 2, 4]


def test_what_cannot_be_used_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        TierError,
        match=r"memory.folder = .*file/under' cannot be used: Not a directory; choose a",
    ):
        TierFile(tmp_path / "file" / "under")
    with pytest.raises(
        TierError,
        match=r"memory.folder = .*file' cannot be used: it is a file; choose a folder",
    ):
        TierFile(tmp_path / "file")
    file = TierFile(tmp_path)
    with pytest.raises(
        TierError,
        match=r"no room for .* bytes in memory.folder = '\S+': .* choose another folder",
    ):
        file.region(1 << 60)
    assert file.size == 0
    kept = file.region(PAGE)
    beside = rf"bytes more in memory.folder = '\S+', beside {PAGE:,} of its own: .* choose another folder"
    with pytest.raises(TierError, match=beside):
        file.region(1 << 60)
    assert file.size == kept.size == PAGE
    opened = os.open

    def buffered(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *mode)

    with mock.patch.object(os, "open", buffered):
        slow = TierFile(tmp_path)
    assert "knows no direct I/O" in slow.note and not file.note
    if Path("/dev/shm").is_mount():
        assert "is in memory itself" in TierFile(Path("/dev/shm")).note
    region, data = slow.region(PAGE), page_buffer(PAGE).fill_(7)
    region.write(data).wait()
    assert (region.memory == 7).all()


def test_a_checkpoint_has_its_room_on_the_disk_from_the_start(tmp_path: Path) -> None:
    """Where a full disk is an error: later it is a signal that ends the rank in the middle of a save."""
    writer = WriterProcess(64 * PAGE, pinned=False, folder=tmp_path / "tier")
    try:
        assert os.fstat(writer._file.fileno()).st_blocks * 512 >= 64 * PAGE
    finally:
        writer.close()
    with pytest.raises(
        TierError,
        match=r"no room for .* bytes in memory.folder .* for what a checkpoint copies",
    ):
        WriterProcess(1 << 60, pinned=False, folder=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(
        TierError, match=r"memory.folder = .*file' cannot be used: it is a file"
    ):
        WriterProcess(PAGE, pinned=False, folder=tmp_path / "file")


def test_memory_that_is_not_there_is_said() -> None:
    with pytest.raises(
        TierError,
        match=r"no memory for a buffer of 4,611,686,018,427,387,904 bytes: Cannot allocate",
    ):
        BufferPool().take(1 << 62)


def test_memory_that_cannot_be_pinned_is_said() -> None:
    refused = mock.Mock(side_effect=RuntimeError("out of memory (2)"))
    with (
        mock.patch.multiple("torch.cuda", cudart=mock.Mock(), check_error=refused),
        pytest.raises(
            TierError,
            match=r"8,192 bytes of the host's memory cannot be pinned .*: out of memory \(2\)",
        ),
    ):
        BufferPool(pinned=True).take(8_000)


def test_the_pool_has_slots_for_every_size() -> None:
    """Of Llama 7B's shapes, scaled down: three blocks, embedding and head, again and again."""
    blocks, ends = [4 * 202_383_360 // 256] * 3, [4 * 131_072_000 // 256] * 2
    pool, payload = BufferPool(), sum(blocks) + sum(ends)
    for size in (*blocks, *ends):
        pool.announce(size)
    for _ in range(3):
        taken = [pool.take(size) for size in (*blocks, *ends)]
        for buffer in taken:
            pool.give(buffer)
    assert (
        pool.most == sum(map(whole_pages, (*blocks, *ends)))
        and payload / pool.most >= 0.95
    )
    assert pool.bytes == sum(map(whole_pages, blocks)), "what is seldom used stays"
    with mock.patch("weft.memory.tier_file.LARGE", ends[0]):
        pool.take(ends[0])
    assert pool.bytes == whole_pages(ends[0]), "what is idle stays beside what is large"


# --- tensors that rest


def test_where_memory_ends_what_is_idle_makes_room() -> None:
    pool = BufferPool()
    for _ in range(COMMON):
        pool.announce(PAGE)
    pool.give(pool.take(PAGE))
    with mock.patch.object(
        tier_file,
        "page_buffer",
        side_effect=[TierError("no memory"), page_buffer(2 * PAGE)],
    ):
        assert pool.take(2 * PAGE).numel() == 2 * PAGE
    assert pool.bytes == 2 * PAGE and pool.most == 2 * PAGE
    with (
        mock.patch.object(tier_file, "page_buffer", side_effect=TierError("no memory")),
        pytest.raises(TierError),
    ):
        pool.take(PAGE)
    assert pool.bytes == 2 * PAGE


def test_where_memory_ends_what_is_leaving_is_waited_for(tmp_path: Path) -> None:
    """Its buffer makes room for the next."""
    resting = Tiers({"weights": "file"}, str(tmp_path))
    values = {
        name: torch.full((PAGE // 4 * (1 + i),), float(i))
        for i, name in enumerate("ab")
    }
    for name, tensor in values.items():
        resting.rest(name, "weights", [tensor])
    with (
        mock.patch.object(RestingGroup, "has_left", False),  # however fast the disk is
        resting.at_hand("a", "weights", changes=True),
    ):
        values["a"].fill_(7)
    assert resting.leaving and resting.pool.bytes == PAGE
    with mock.patch.object(
        tier_file,
        "page_buffer",
        side_effect=[TierError("no memory"), page_buffer(2 * PAGE)],
    ):
        resting.fetch("b", "weights")
    assert not resting.leaving and resting.pool.bytes == 2 * PAGE
    resting.settle()
    assert (values["a"] == 7).all() and (values["b"] == 1).all()


def test_tensors_come_and_go_and_keep_their_values(tmp_path: Path) -> None:
    tiers = Tiers({"moments": "file"}, str(tmp_path))
    owners = {
        name: [torch.randn(300), torch.randn(3, 5).double(), torch.randn(0)]
        for name in "abcd"
    }
    wanted = {name: [t.clone() for t in tensors] for name, tensors in owners.items()}
    for name, tensors in owners.items():
        tiers.rest(name, "moments", tensors)
        tiers.rest(name, "weights", [torch.ones(3)])  # on the device
    size = PAGE
    for turn in range(3):
        for name, tensors in owners.items():
            with tiers.updating(name):
                for t, w in zip(tensors, wanted[name], strict=True):
                    assert torch.equal(t, w)
                    t.add_(turn + 1)
                    w.add_(turn + 1)
        tiers.settle()
        assert all(
            torch.equal(t, w)
            for name in owners
            for t, w in zip(owners[name], wanted[name], strict=True)
        )
        assert tiers.bytes == {
            "read": size * 4 * (turn + 1),
            "written": size * 4 * (turn + 1),
        }
    assert tiers.pool.bytes <= 3 * size
    with pytest.raises(ZeroDivisionError), tiers.updating("a"):
        owners["a"][0].zero_()
        raise ZeroDivisionError
    tiers.settle()
    assert torch.equal(owners["a"][0], wanted["a"][0]), "half an update was written"


# --- steps


def run(
    corpus: str,
    memory: dict[str, str],
    steps: int,
    seen: list[State] | None = None,
    **change: Any,
) -> tuple[list[Any], State]:
    """Some steps on one device; ``seen`` gets the state before the first, also if they fail."""
    settings = recipe(
        corpus, **{f"memory__{key}": value for key, value in memory.items()}, **change
    )
    job, mesh = prepare(settings), Mesh.single()
    model, state = build_for_training(job.shape, mesh, settings)
    stepper, loader = (
        build_step(StepContext(model, state, mesh), settings),
        job.loader(job.corpus.train, mesh),
    )
    results: list[Any] = []
    if seen is not None:
        seen.append(state)
    for step in range(steps):
        results += stepper.take(loader.step(step * settings.train.batch) or [], 1e-3)
    return results + stepper.finish(), state


@pytest.mark.sampled(7)
@pytest.mark.parametrize("change", [
    {"train__dtype": "float32", "train__micro_batch": 1},
    {"optimizer__kind": "muon", "optimizer__ema": 0.9, "optimizer__clip": 0.1, "train__micro_batch": 2},
    {"optimizer__state": "4bit", "model__ffn": 42, "train__recompute": "full", "model__tied": True},
    {"optimizer__kind": "galore", "optimizer__rank": 3, "train__freeze": ["blocks.0.*"]},
    {"adapter__rank": 2, "adapter__kind": "lora", "train__micro_batch": 3},
    {"optimizer__in_backward": True, "optimizer__clip": 0.0},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("memory", [
    {"moments": "file"}, {"weights": "file", "gradients": "host", "moments": "host"}, EVERYTHING,
], ids=lambda memory: "+".join(memory))  # fmt: skip
def test_tiers_change_no_bit(
    corpus: str, tmp_path: Path, memory: dict[str, str], change: dict[str, Any]
) -> None:
    if "optimizer__in_backward" in change and "weights" in memory:
        pytest.skip("refused")
    plain, resident = run(corpus, {}, 3, **change)
    found, state = run(corpus, {**memory, "folder": str(tmp_path)}, 3, **change)
    assert [r[:4] for r in found] == [r[:4] for r in plain]
    wanted = resident.tensors()
    for name, part in state.tensors().items():
        assert torch.equal(part.values, wanted[name].values), name


@pytest.mark.parametrize("memory", [{"moments": "file"}, EVERYTHING], ids="+".join)
def test_what_a_disk_has_damaged_is_not_saved(
    corpus: str, tmp_path: Path, memory: dict[str, str]
) -> None:
    """A checkpoint copies from the file's memory, where nothing else compares it with what was written."""
    _, state = run(corpus, {**memory, "folder": str(tmp_path)}, 2)
    state.saved()
    _, state = run(corpus, {**memory, "folder": str(tmp_path)}, 2)
    group = next(groups["moments"] for groups in reversed(state.tiers.groups.values()))
    assert group.region is not None
    group.region.memory[9] ^= 1
    with pytest.raises(
        TierError, match=rf"memory.folder = '{tmp_path}' failed: .* damaged"
    ):
        state.saved()


def regions(state: State) -> dict[str, int]:
    """Bytes of the regions of all units, by kind."""
    found: dict[str, int] = {}
    for groups in state.tiers.groups.values():
        for kind, group in groups.items():
            if group.region is not None:
                found[kind] = found.get(kind, 0) + group.region.size
    return found


@pytest.mark.parametrize("rows", [5, 1], ids="rows={}".format)
def test_bytes_are_those_of_the_formula(corpus: str, tmp_path: Path, rows: int) -> None:
    """Weights are read twice for a step, whatever the number of microbatches: in forward with all that an update needs.

    Those of the last two stages stay from forward to backward.
    The first forward has nothing to update, and the last step's update is made at the end.
    """
    _, state = run(
        corpus, {**EVERYTHING, "folder": str(tmp_path)}, 2, train__micro_batch=rows
    )
    size, last = regions(state), 0
    for unit, groups in state.tiers.groups.items():
        if any(h.name.startswith(("blocks.1.", "norm", "head")) for h in unit.held):  # type: ignore[attr-defined]
            last += groups["weights"].region.size  # type: ignore[union-attr]
    every = size["weights"] + size["gradients"] + size["moments"]
    assert state.tiers.bytes == {
        "read": size["weights"] + 2 * (size["weights"] - last) + 2 * every,
        "written": 2 * every,
    }
    assert (
        size["moments"] <= 2 * size["weights"] and size["gradients"] == size["weights"]
    )


@pytest.mark.parametrize(
    "speculate", ["none", pytest.param("all", marks=pytest.mark.slow(2))]
)
def test_what_has_room_stays_from_forward_to_backward(
    corpus: str, tmp_path: Path, speculate: str
) -> None:
    """Weights of as many blocks more as the buffer has room for are read once in a step; no bit changes."""
    memory = {**EVERYTHING, "folder": str(tmp_path), "speculate": speculate}
    change = {
        f"model__{key}": value
        for key, value in {"layers": 6, "embed": 96, "ffn": 288, "head_dim": 24}.items()
    }
    steps, sides = 2, {}
    for room in (0, 1, 2, 64):
        results, state = run(
            corpus, {**memory, "buffer": room}, steps, **change, train__dtype="float32"
        )
        sides[room] = [r[:4] for r in results], state
    losses, plain = sides[0]
    weights = [
        groups["weights"].region.size
        for groups in plain.tiers.groups.values()
        if groups
    ]  # type: ignore[union-attr]
    block = max(weights)
    assert weights[1:-1] == [block] * 6
    again = sum(weights[:-2])  # is read again for backward if there is no room
    for room, (found, state) in sides.items():
        assert found == losses, room
        saved = min(again, (room << 20) // block * block)
        if speculate == "none":
            assert (
                plain.tiers.bytes["read"] - state.tiers.bytes["read"] == steps * saved
            )
        else:
            assert (
                plain.tiers.bytes["read"] - state.tiers.bytes["read"]
                >= (steps - 1) * saved
            )
        assert state.tiers.bytes["written"] == plain.tiers.bytes["written"]
        assert state.tiers.pool.most <= plain.tiers.pool.most + saved
        wanted = plain.tensors()
        assert all(
            torch.equal(part.values, wanted[name].values)
            for name, part in state.tensors().items()
        )


def test_what_rests_takes_no_memory(corpus: str, tmp_path: Path) -> None:
    """Buffers of three units at most, of the kinds that are used together, however many blocks there are."""
    for layers in (3, 9):
        _, state = run(
            corpus, {**EVERYTHING, "folder": str(tmp_path)}, 1, model__layers=layers
        )
        units = {
            sum(g.region.size for g in groups.values())
            for groups in state.tiers.groups.values()
            if groups
        }  # type: ignore[union-attr]
        assert state.tiers.pool.most <= 4 * max(units)


def test_what_an_update_needed_has_left_before_the_unit_computes(
    corpus: str, tmp_path: Path
) -> None:
    """A large embedding is not in memory as parameter, weights and gradient at once."""
    gather, seen = TableUnit.gather, list[bool]()

    def looked_at(unit: TableUnit, *given: Any) -> None:
        if group := unit.tiers.groups[unit].get("gradients"):
            seen.append(group.buffer is None)
        gather(unit, *given)

    with mock.patch.object(TableUnit, "gather", looked_at):
        run(corpus, {**EVERYTHING, "folder": str(tmp_path)}, 3)
    assert seen and all(seen)


def test_what_does_not_learn_has_no_gradients_anywhere(
    corpus: str, tmp_path: Path
) -> None:
    _, state = run(corpus, {**EVERYTHING, "folder": str(tmp_path)}, 1, adapter__rank=2)
    kept = {
        name
        for unit in state.units
        if isinstance(unit, TableUnit)
        for name in unit.reduced
    }
    assert kept == {h.name for h in state.learning} and len(kept) < len(state.held)


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="other systems count other memory")
@pytest.mark.parametrize("limit, share, model", [
    (720, 4.0, {"layers": 108, "embed": 384, "heads": 6}),
    (1024, 2.0, {"layers": 30, "embed": 576, "heads": 9, "kv_heads": 3, "ffn": 1536, "vocab": 49152, "tied": "true"}),
], ids=["four times the limit", "SmolLM2-135M"])  # fmt: skip
def test_what_does_not_fit_in_memory_trains_from_a_file(
    tmp_path: Path, limit: int, share: float, model: dict[str, Any]
) -> None:
    """With so many MiB for all that a process allocates: checkpoints as of one that has all it wants, bit by bit.

    ``share``: how many times the limit the training state is, 16 bytes for every parameter.
    """
    settings = {f"model.{key}": value for key, value in model.items()} | {
        "train.steps": 2, "train.batch": 2, "train.micro_batch": 1, "train.threads": 1, "train.loss_chunk": 32,
        "data.seq_len": 128, "validation.every": 0, "observe.split_every": 0, "data.cache": tmp_path / "cache",
        "memory.folder": tmp_path,
    }  # fmt: skip

    def trained(
        name: str, limited: bool, **memory: str
    ) -> subprocess.CompletedProcess[str]:
        given = settings | {f"memory.{kind}": place for kind, place in memory.items()}
        words = [
            word for key, value in given.items() for word in ("--set", f"{key}={value}")
        ]

        def limit_memory() -> None:
            # Of every thread: all of it counts as data, though hardly any of it is ever touched.
            resource.setrlimit(resource.RLIMIT_STACK, (1 << 20,) * 2)
            if limited:
                resource.setrlimit(resource.RLIMIT_DATA, (limit << 20,) * 2)

        return subprocess.run(
            [sys.executable, "-m", "weft", "train", "files", "--out", str(tmp_path / name), *words],
            preexec_fn=limit_memory, capture_output=True, text=True,
        )  # fmt: skip

    def written(name: str) -> dict[str, torch.Tensor]:
        data = tmp_path / name / "checkpoints" / "step-000002" / "data"
        return {
            key: value
            for path in data.iterdir()
            for key, value in load_file(path).items()
        }

    assert trained("short", True, weights="device").returncode, (
        "the limit holds nobody up"
    )
    for name, done in (
        ("file", trained("file", True)),
        ("memory", trained("memory", False, weights="device")),
    ):
        assert not done.returncode, (name, done.stderr)
    found, wanted = written("file"), written("memory")
    assert sum(value.nbytes for value in wanted.values()) * 4 / 3 >= share * (
        limit << 20
    )
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        # whose two gradients of the embedding are added in another order
        if model.get("tied"):
            assert torch.linalg.vector_norm(
                found[key] - value
            ) <= 1e-5 * torch.linalg.vector_norm(value), key
        else:
            assert torch.equal(found[key], value), key


@contextmanager
def disk_that_fails(at: int) -> Iterator[Counter[str]]:
    """In here the read or write of this number, from 1, fails. Gives how many have been ``made``."""
    calls: Counter[str] = Counter()

    def failing(real: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            calls["made"] += 1
            if calls["made"] == at:
                raise OSError(5, "Input/output error")
            return real(*arguments)

        return call

    with mock.patch.multiple(
        os, preadv=failing(os.preadv), pwritev=failing(os.pwritev)
    ):
        yield calls


@pytest.mark.slow
@pytest.mark.parametrize("points", [25, pytest.param(200, marks=pytest.mark.soak)])
def test_a_disk_that_fails_is_named_and_nothing_is_half_updated(
    corpus: str, tmp_path: Path, points: int
) -> None:
    """At so many points of three steps: the error names the folder, and what is left is never looked at."""
    memory = {**EVERYTHING, "folder": str(tmp_path)}
    with disk_that_fails(at=0) as calls:
        run(corpus, memory, 3)
    total = calls["made"]
    for at in sorted({1 + total * i // points for i in range(points)}):
        seen: list[State] = []
        with disk_that_fails(at), pytest.raises(TierError) as error:
            run(corpus, memory, 3, seen)
        assert str(tmp_path) in str(error.value) and "Input/output error" in str(
            error.value
        )
        # nobody, a checkpoint least of all, sees what may be half an update
        with pytest.raises(TierError):
            seen[0].tensors()


def test_pinned_memory_is_registered_as_long_as_it_is_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered: set[int] = set()
    monkeypatch.setattr(
        tier_file, "pin", lambda buffer: registered.add(buffer.data_ptr())
    )
    monkeypatch.setattr(pinned, "unpin", registered.remove)
    buffer = tier_file.page_buffer(100, pinned=True)
    part = buffer[:10]
    del buffer
    assert part.data_ptr() in registered
    del part
    assert not registered
