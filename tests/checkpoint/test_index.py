"""The index of a checkpoint accepts blocks that hold every element once, and nothing else."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.measured import until_true
from weft.checkpoint.boxes import DamagedCheckpoint, volume
from weft.checkpoint.format import StoredBlock, root_index
from weft.layout.dims import Box, Tensor, part


def tiling(shape: tuple[int, ...], cuts: list[tuple[int, int, int]]) -> list[Box]:
    """Cut boxes in two, again and again: which box, along which dimension, at which place (modulo what there is)."""
    boxes: list[Box] = [tuple((0, n) for n in shape)]
    for which, dim, place in cuts if shape else ():
        box = boxes.pop(which % len(boxes))
        lo, hi = box[d := dim % len(box)]
        at = lo + place % (hi - lo)
        halves = ((lo, at), (at, hi))
        boxes += [
            (*box[:d], half, *box[d + 1 :]) for half in halves if half[0] < half[1]
        ]
    return boxes


def indexed(
    shape: tuple[int, ...], boxes: list[Box], manifests: int = 3
) -> dict[str, Any]:
    tensors = {"w": Tensor(shape, "F32")}
    found = {}
    for r in range(manifests):
        found[f"m{r}"] = (
            tensors,
            [
                StoredBlock("w", box, f"d{r}", 0, 4 * volume(box), "")
                for box in boxes[r::manifests]
            ],
        )
    return root_index(found)


shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)
any_cuts = st.lists(
    st.tuples(st.integers(0, 99), st.integers(0, 3), st.integers(0, 99)), max_size=12
)


@given(shapes, any_cuts, st.randoms())
@settings(max_examples=100, deadline=None)
def test_every_tiling_is_accepted(
    shape: tuple[int, ...], cuts: list[tuple[int, int, int]], random: Any
) -> None:
    boxes = tiling(shape, cuts)
    random.shuffle(boxes)
    table = indexed(shape, boxes)
    (place,) = table["places"]
    assert table["tensors"]["w"]["place"] == 0
    assert [number for number, _ in place] == [r for r in range(3) if boxes[r::3]]
    for number, hull in place:  # exactly around what the manifest holds
        for d, (lo, hi) in enumerate(hull):
            assert lo == min(b[d][0] for b in boxes[number::3]) and hi == max(
                b[d][1] for b in boxes[number::3]
            )


@given(shapes, any_cuts, st.data())
@settings(max_examples=100, deadline=None)
def test_one_wrong_box_is_found_and_an_element_is_named(
    shape: tuple[int, ...], cuts: list[tuple[int, int, int]], data: Any
) -> None:
    boxes = tiling(shape, cuts)
    which = data.draw(st.integers(0, len(boxes) - 1))
    what = data.draw(
        st.sampled_from(["dropped", "twice", "another", "shifted", "widened"])
    )
    if what == "dropped":
        del boxes[which]
    elif what == "twice":
        boxes.append(boxes[which])
    elif what == "another":  # and one is missing: as many blocks as before
        boxes[which] = boxes[which - 1]
    elif shape:
        d = data.draw(st.integers(0, len(shape) - 1))
        box = boxes[which]
        by = data.draw(st.integers(-3, 3))
        moved = (
            (box[d][0] + by, box[d][1] + by)
            if what == "shifted"
            else (box[d][0] + by, box[d][1])
        )
        boxes[which] = (*box[:d], moved, *box[d + 1 :])
    wrong = covered(shape, boxes) != 1
    if not wrong.any() and all(
        0 <= lo < hi <= n
        for box in boxes
        for (lo, hi), n in zip(box, shape, strict=True)
    ):
        # nothing is wrong after all: it was moved by 0, or replaced by itself
        indexed(shape, boxes)
        return
    with pytest.raises(
        DamagedCheckpoint,
        match=r"^(the blocks of w have \d+ elements|a block of w is no part)",
    ) as caught:
        indexed(shape, boxes)
    text = str(caught.value)
    if "more than once" in text or "in none" in text:
        at = tuple(
            int(n)
            for n in text[text.index("; [") + 3 : text.rindex("]")].split(",")
            if n
        )
        assert covered(shape, boxes)[at] != 1 and ("in none" in text) == (
            covered(shape, boxes)[at] == 0
        )


def covered(shape: tuple[int, ...], boxes: list[Box]) -> Any:
    """How often each element is in a box; what is outside of the tensor is not counted."""
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        count[tuple(slice(max(lo, 0), max(hi, 0)) for lo, hi in box)] += 1
    return count


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        # A gap and an overlap of the same size: the numbers of elements agree.
        ([((0, 2), (0, 4)), ((1, 3), (0, 4))], r"\[1, 0\] is more than once"),
        ([((0, 3), (0, 2)), ((0, 3), (3, 5))], r"\[0, 2\] is in none"),
        ([((0, 3), (0, 4)), ((3, 4), (0, 4))], r"\[3, 0\] is outside of the tensor"),
        ([((0, 3), (0, 5)), ((0, 3), (5, 4))], r"no part of a tensor"),
        ([((0, 3),)], r"no part of a tensor"),
        ([], r"have 0 elements, the tensor has 12; \[0, 0\] is in none"),
    ],
)
def test_known_mistakes(boxes: list[Box], message: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=message):
        indexed((3, 4), boxes)


def test_tensors_without_elements_need_no_blocks() -> None:
    assert indexed((0, 4), [])["places"] == [[]]
    with pytest.raises(DamagedCheckpoint):
        indexed((), [])
    with pytest.raises(DamagedCheckpoint):
        indexed((), [(), ()])


def test_a_hundred_thousand_blocks_are_quick() -> None:
    """0.3 s on a core of 2024; a checkpoint of 512 ranks has about this many blocks per 200 tensors."""
    tensors = {f"layers.{i}.w": Tensor((8192, 4096), "BF16") for i in range(200)}
    manifests = {}
    for rank in range(512):
        box = (part(8192, 512, rank), (0, 4096))
        manifests[f"m{rank}"] = (
            tensors,
            [StoredBlock(name, box, "f", 0, 1, "") for name in tensors],
        )

    def took(made: dict[str, Any]) -> float:
        begun = time.process_time()
        root_index(made)
        return time.process_time() - begun

    until_true(lambda: took(manifests), lambda seconds: seconds < 1.5)
    table = root_index(manifests)
    assert len(table["places"]) == 1 and len(table["places"][0]) == 512
    grid = list(
        itertools.product(
            [part(4096, 64, i) for i in range(64)],
            [part(4096, 256, i) for i in range(256)],
        )
    )
    blocks = {
        "m": (
            {"w": Tensor((4096, 4096), "F32")},
            [StoredBlock("w", box, "f", 0, 1, "") for box in grid],
        )
    }
    until_true(lambda: took(blocks), lambda seconds: seconds < 0.5)
