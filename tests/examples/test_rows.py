"""Rows of a table in a file: those of the table, whatever is asked for, and by the pages that they lie on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from examples.gnnpipe.rows import NEAR, Rows
from weft.memory.nameless_file import TierError
from weft.memory.tier_file import PAGE, PIECE, TierFile


@pytest.fixture
def file(tmp_path: Path) -> TierFile:
    return TierFile(tmp_path)


@pytest.mark.parametrize("near", [0, NEAR])
@pytest.mark.parametrize(("shape", "dtype"), [
    ((9000, 7), torch.float32), ((700, 3, 5), torch.float64), ((300, 5000), torch.bfloat16), ((20000, 3), torch.int8),
    ((70000, 32), torch.float32), ((1, 1), torch.float32), ((64, 1024), torch.float32),
], ids=str)  # fmt: skip
def test_rows_are_those_of_the_table(
    file: TierFile, shape: tuple[int, ...], dtype: torch.dtype, near: int
) -> None:
    """Rows across pages, several on one, twice, in any order and shape, of all of the table; more than one piece."""
    rng = torch.Generator().manual_seed(0)
    table = torch.randint(-100, 100, shape, generator=rng).to(dtype)
    rows = Rows(table, file, near)
    assert len(rows) == len(table) and not file.bytes["read"]
    indices = [
        torch.randint(len(table), size, generator=rng)
        for size in [(1,), (300,), (7, 1, 3)]
    ]
    indices += [
        torch.arange(len(table)),
        torch.arange(len(table)).flip(0),
        torch.tensor([0, len(table) - 1, 0]),
    ]
    for index in indices:
        found = rows[index]
        assert found.dtype == dtype and torch.equal(found, table[index])
    empty = rows[torch.zeros(0, 2, dtype=torch.int64)]
    assert empty.shape == (0, 2, *shape[1:])
    assert table.nbytes > PIECE or shape != (70000, 32)


def test_a_call_reads_each_page_once_and_little_between(file: TierFile) -> None:
    width = PAGE // 4
    table = torch.arange(4000 * width, dtype=torch.float32).view(-1, width // 4)
    rows = Rows(table, file, near=2)
    calls: list[tuple[int, int]] = []
    preadv = os.preadv

    def counted(descriptor: int, parts: list[memoryview], offset: int) -> int:
        calls.append((offset // PAGE, len(parts[0]) // PAGE))
        return preadv(descriptor, parts, offset)

    # Pages 0, 1, 4 (two pages between), 8 (three between), and the last.
    index = torch.tensor([[3999, 0, 1, 3], [4, 16, 17, 34], [0, 34, 3, 3999]])
    with mock.patch.object(os, "preadv", counted):
        assert torch.equal(rows[index], table[index])
    assert sorted(calls) == [(0, 5), (8, 1), (999, 1)]
    assert (
        rows.bytes == {"asked": 12 * width, "touched": 5 * PAGE, "read": 7 * PAGE}
        and file.bytes["read"] == 7 * PAGE
    )
    exact = Rows(table, file, near=0)
    index = torch.randint(4000, (500,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(exact[index], table[index])
    assert (
        exact.bytes["read"]
        == exact.bytes["touched"]
        == PAGE * (index // 4).unique().numel()
    )


def test_what_is_no_row_and_a_disk_that_fails_are_named(file: TierFile) -> None:
    rows = Rows(torch.ones(100, 3), file)
    for number in (-1, 100):
        with pytest.raises(IndexError, match=rf"row {number} of a table of 100"):
            rows[torch.tensor([5, number])]

    def failing(*arguments: Any) -> int:
        raise OSError(5, "Input/output error")

    with (
        mock.patch.object(os, "preadv", failing),
        pytest.raises(TierError, match=r"memory\.folder .*Input/output error"),
    ):
        rows[torch.tensor([5])]
    assert torch.equal(rows[torch.tensor([5])], torch.ones(1, 3))
