"""Blocks: every element once, whole rows and columns where later cuts will fall, readable by safetensors itself."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from weft.checkpoint.boxes import BLOCK, intersection, replica_share, volume
from weft.checkpoint.format import Manifest, cut_blocks, root_index
from weft.checkpoint.load import StoredCheckpoint
from weft.checkpoint.save import Saver
from weft.checkpoint.staging import plan_pieces
from weft.checkpoint.storage import LocalStorage
from weft.checkpoint.store import stored_files, verify
from weft.errors import WeftError
from weft.layout.dims import Box, Tensor, part
from weft.layout.parts import NAMES, Part

boxes = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 60)), min_size=1, max_size=3
).map(lambda edges: tuple((lo, lo + n) for lo, n in edges))


@given(
    boxes,
    st.integers(1, 5),
    st.sampled_from([1, 4000, 400_000]),
    st.integers(0, 1 << 31),
)
@settings(max_examples=100, deadline=None)
def test_holders_share_a_box_without_gap_or_overlap(
    box: Box, replicas: int, itemsize: int, key: int
) -> None:
    shares = [
        s
        for r in range(replicas)
        if (s := replica_share(box, itemsize, r, replicas, key)) is not None
    ]
    assert sum(map(volume, shares)) == volume(box)
    assert all(
        intersection(a, b) is None for i, a in enumerate(shares) for b in shares[:i]
    )


@given(boxes, st.sampled_from([1, 4, 8, 30_000]))
@settings(max_examples=100, deadline=None)
def test_blocks_cover_a_box_and_are_no_larger_than_they_should_be(
    box: Box, itemsize: int
) -> None:
    shape = [hi + 3 for _, hi in box]
    found = list(cut_blocks(box, shape, itemsize))
    assert sum(map(volume, found)) == volume(box)
    assert all(
        intersection(a, b) is None for i, a in enumerate(found) for b in found[:i]
    )
    row = math.prod(hi - lo for lo, hi in box[1:]) * itemsize
    assert all(volume(b) * itemsize <= max(1.5 * BLOCK, row) for b in found)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_eighths_of_columns_and_rows_are_whole_blocks(ranks: int) -> None:
    """What was saved as four shares of rows is read as shares of columns, or as more shares of rows, block by block."""
    shape = (4096, 2048)
    saved = [
        b for r in range(4) for b in cut_blocks((part(4096, 4, r), (0, 2048)), shape, 4)
    ]
    for r in range(ranks):
        for wanted in (
            (part(4096, ranks, r), (0, 2048)),
            ((0, 4096), part(2048, ranks, r)),
        ):
            assert sum(volume(b) for b in saved if intersection(b, wanted)) == volume(
                wanted
            )


def state(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "model.wide": torch.randn(700, 1030, generator=g),
        "model.odd": torch.randn(7, 5, 3, generator=g, dtype=torch.float64),
        "model.vector": torch.randn(33, generator=g).to(torch.bfloat16),
        "model.scalar": torch.tensor(3, dtype=torch.int64),
        "model.empty": torch.zeros(0, 4),
    }


def locals_of(values: dict[str, torch.Tensor]) -> dict[str, Part]:
    return {
        name: Part(
            v, tuple((0, n) for n in v.shape), Tensor(tuple(v.shape), NAMES[v.dtype])
        )
        for name, v in values.items()
    }


def saved(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    values, saver = state(seed), Saver(lambda text: None)
    saver.save(
        LocalStorage(folder),
        7,
        locals_of(values),
        {"layout": "one"},
        {"note.txt": b"hello"},
    )
    saver.finish()
    saver.close()
    return values


def test_round_trip_is_exact_and_other_programs_can_read_it(tmp_path: Path) -> None:
    values = saved(tmp_path)
    checkpoint = StoredCheckpoint(LocalStorage(tmp_path))
    back = {name: torch.full_like(v, 1) for name, v in values.items()}
    checkpoint.load(locals_of(back))
    assert all(torch.equal(back[name], values[name]) for name in values)
    assert checkpoint.meta["step"] == 7
    for name, content in stored_files(checkpoint).items():
        (tmp_path / name).write_bytes(content)
    assert (tmp_path / "note.txt").read_bytes() == b"hello"
    with safe_open(next(tmp_path.glob("data/*.safetensors")), "pt") as file:
        assert torch.equal(
            file.get_tensor("model.odd@0:7,0:5,0:3"), values["model.odd"]
        )


def test_a_second_commit_does_not_touch_the_first(tmp_path: Path) -> None:
    values = saved(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(WeftError, match="committed before"):
        saved(tmp_path, seed=1)
    assert all(p.read_bytes() == data for p, data in before.items())
    back = {name: torch.zeros_like(v) for name, v in values.items()}
    StoredCheckpoint(LocalStorage(tmp_path)).load(locals_of(back))
    assert torch.equal(back["model.wide"], values["model.wide"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ``state(0)``, to be copied."""
    folder = tmp_path_factory.mktemp("checkpoint")
    saved(folder)
    return folder


@pytest.mark.parametrize("where", ["data", "manifest", "weft.json", "files"])
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_a_flipped_bit_or_a_lost_end_is_found(
    tmp_path_factory: Any, whole: Path, where: str, data: Any
) -> None:
    folder, values = tmp_path_factory.mktemp("damaged"), state(0)
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    path = next(
        p for p in [folder / where, *(folder / where).rglob("*")] if p.is_file()
    )
    content = bytearray(path.read_bytes())
    payload = sum(v.numel() * v.element_size() for v in values.values())
    at = data.draw(
        st.integers(len(content) - payload if where == "data" else 0, len(content) - 1)
    )
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    path.write_bytes(bytes(content))
    back = {name: torch.zeros_like(v) for name, v in values.items()}
    try:
        checkpoint = StoredCheckpoint(LocalStorage(folder))
        verify(checkpoint)
        checkpoint.load(locals_of(back))
    except WeftError as error:
        assert (
            "damaged" in str(error)
            or "not a checkpoint" in str(error)
            or "format" in str(error)
        )
    else:  # only where the root holds what no value depends on
        assert where == "weft.json"
        assert all(torch.equal(back[name], values[name]) for name in values)


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    values = saved(tmp_path)
    wanted = locals_of({"model.wide": torch.zeros(700, 9), "model.new": torch.zeros(2)})
    with pytest.raises(
        WeftError, match=r"different model.wide.*\n.*missing   model.new"
    ) as caught:
        StoredCheckpoint(LocalStorage(tmp_path)).load(wanted)
    assert "extra     model.odd" in str(caught.value) and values


def test_the_index_refuses_gaps(tmp_path: Path) -> None:
    saved(tmp_path)
    name = next(tmp_path.glob("manifest/*.json"))
    tree = json.loads(name.read_bytes())
    for column in ("tensor", "box", "offset", "bytes", "xxh3"):
        tree[column].pop()
    with pytest.raises(WeftError, match="elements"):
        described = Manifest(json.dumps(tree).encode(), "m")
        root_index({"m": (described.tensors, list(described))})


def test_the_plan_is_balanced() -> None:
    whole = torch.empty(4096, 1024)
    tensor = Tensor((4096, 1024), "F32")
    sizes = [
        sum(
            p.size
            for p in plan_pieces(
                {"w": Part(whole, ((0, 4096), (0, 1024)), tensor, r, 4)}
            )
        )
        for r in range(4)
    ]
    assert sizes == [1 << 22] * 4
