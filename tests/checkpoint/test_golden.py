"""What format 2 was when it was first written must be read, exactly, by every later version.

The files were made with ``python -m tests.checkpoint.test_golden tests/checkpoint/golden/format-2``. They are never
made again for the same format number: if reading them breaks, reading users' checkpoints breaks. A new format gets a
new folder beside this one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from weft.checkpoint.boxes import checksum, volume
from weft.checkpoint.load import StoredCheckpoint
from weft.checkpoint.pack import index_within
from weft.checkpoint.staging import plan_pieces
from weft.checkpoint.storage import LocalStorage
from weft.checkpoint.store import verify
from weft.checkpoint.write_task import Commit, WriteTask
from weft.checkpoint.writer import commit, write_share
from weft.layout.dims import Box, Tensor, part
from weft.layout.parts import NAMES, Part

GOLDEN = Path(__file__).with_name("golden") / "format-2"
META = {
    "step": 12,
    "layout": "shard=2",
    "world": 2,
    "recipe": {
        "name": "golden, größer",
        "optimizer": {"lr": 3e-05, "betas": [0.9, 0.95], "clip": None},
    },
    "data": "0123456789abcdef",
    "progress": {"step": 12, "position": 96, "tokens": 1536, "updates": 11},
}
NOTE = b"the only other file\n"


def values() -> dict[str, torch.Tensor]:
    """Every dtype, odd shapes, a scalar, empty tensors, columns that are cut, and numbers that are easily lost."""

    def numbers(*shape: int) -> torch.Tensor:
        return (
            (torch.arange(torch.Size(shape).numel()) * 37 % 101 - 50) / 8.0
        ).reshape(shape)

    odd = [
        0.0,
        -0.0,
        float("inf"),
        -float("inf"),
        float("nan"),
        1e-45,
        1.1754944e-38,
        3.4028235e38,
        16777217.0,
    ]
    return {
        "model.wide": numbers(3, 1030),
        "model.cut_by_columns": numbers(5, 7).bfloat16(),
        "model.tall": numbers(11, 2, 3).bfloat16(),
        "model.half": numbers(13).half(),
        "model.special": torch.tensor(odd),
        "model.scalar": torch.tensor(-(2**53) - 1),
        "model.empty": torch.zeros(0, 4),
        "model.straße": torch.tensor([True, False, True]),
        "optimizer.exp_avg.model.tall": numbers(11, 2, 3).double() / 3,
        "optimizer.step": torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32),
        "rng.bytes": torch.arange(256).to(torch.uint8),
    }


def locals_of(rank: int) -> dict[str, Part]:
    """What one of two ranks holds: rows, or columns, or (of small tensors) all, as the other one does."""
    found = {}
    for name, v in values().items():
        box: Box = tuple((0, n) for n in v.shape)
        replicas = 1
        if name == "model.cut_by_columns":
            box = (box[0], part(7, 2, rank))
        elif v.dim() and v.shape[0] > 2:
            box = (part(v.shape[0], 2, rank), *box[1:])
        else:
            replicas = 2
        dims = ("row", "column", "depth")[: v.dim()] if name.startswith("model") else ()
        tensor = Tensor(tuple(v.shape), NAMES[v.dtype], dims)
        found[name] = Part(
            v[index_within(box, tuple((0, n) for n in v.shape))],
            box,
            tensor,
            rank * (replicas - 1),
            replicas,
        )
    return found


def make(folder: Path) -> None:
    storage = LocalStorage(folder)
    manifests = tuple(f"manifest/golden-{rank:05d}.json" for rank in range(2))
    for rank in range(2):
        held = locals_of(rank)
        pieces = plan_pieces(held)
        payload = bytearray(max(1, sum(p.size for p in pieces)))
        for p in pieces:
            v = held[p.name].values[index_within(p.box, held[p.name].box)].contiguous()
            assert v.numel() == volume(p.box)
            payload[p.offset : p.offset + p.size] = (
                v.view(-1).view(torch.uint8).numpy().tobytes()
            )
        tensors = {name: local.tensor for name, local in held.items()}
        shares = tuple((p.name, p.box) for p in pieces)
        data = f"data/golden-{rank:05d}.safetensors"
        report = write_share(
            WriteTask(storage, data, manifests[rank], tensors, shares, None), payload
        )  # type: ignore[arg-type]
        assert not report.problem, report.problem
    commit(storage, Commit(manifests, META, {"files/golden/note.txt": NOTE}, 0))


def bits(v: torch.Tensor) -> bytes:
    return bytes(v.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def test_the_files_are_those_that_were_first_written() -> None:
    found = {
        p.relative_to(GOLDEN).as_posix(): p.read_bytes()
        for p in sorted(GOLDEN.rglob("*"))
        if p.is_file()
    }
    assert len(found) == 6 and sum(map(len, found.values())) < 60_000
    assert (
        checksum(b"".join(name.encode() + data for name, data in found.items()))
        == "720542aa95caa058c587dc34adf5d50a"
    )


def test_they_are_read_exactly() -> None:
    checkpoint = StoredCheckpoint(LocalStorage(GOLDEN))
    expected = values()
    assert {k: v for k, v in checkpoint.meta.items() if k in META} == META
    assert {name: (t.shape, t.dtype) for name, t in checkpoint.tensors.items()} == {
        name: (tuple(v.shape), NAMES[v.dtype]) for name, v in expected.items()
    }
    assert checkpoint.tensors["model.tall"].dims == ("row", "column", "depth")
    assert [
        checkpoint.file(name, *about)
        for name, about in checkpoint.meta["files"].items()
    ] == [NOTE]
    assert verify(checkpoint) == sum(
        v.numel() * v.element_size() for v in expected.values()
    )
    back = {name: torch.ones_like(v) for name, v in expected.items()}
    boxes = {name: tuple((0, n) for n in v.shape) for name, v in back.items()}
    checkpoint.load(
        {
            name: Part(v, boxes[name], checkpoint.tensors[name])
            for name, v in back.items()
        }
    )
    assert {
        name for name in expected if bits(back[name]) != bits(expected[name])
    } == set()
    for rank in range(2):  # and as other parts than were saved
        wanted = {
            name: ((n // 3 * rank, n - rank) for n in v.shape)
            for name, v in expected.items()
        }
        parts = {name: tuple(box) for name, box in wanted.items()}
        some = {
            name: torch.ones_like(expected[name][index_within(box, boxes[name])])
            for name, box in parts.items()
        }
        checkpoint.load(
            {
                name: Part(v, parts[name], checkpoint.tensors[name])
                for name, v in some.items()
                if v.numel()
            }
        )
        for name, v in some.items():
            assert bits(v) == bits(
                expected[name][index_within(parts[name], boxes[name])]
            ), name


if __name__ == "__main__":
    make(Path(sys.argv[1]))
