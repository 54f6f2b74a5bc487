"""The process's own memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weft.memory.heap import use_huge_pages


def huge_kilobytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages"):
            return int(line.split()[1])
    return 0


def test_large_tensors_move_to_huge_pages_and_keep_their_values() -> None:
    x = torch.arange(10_000_000, dtype=torch.float32)
    try:
        before = huge_kilobytes()
    except OSError:
        pytest.skip("no Linux")
    use_huge_pages()
    assert torch.equal(x, torch.arange(10_000_000, dtype=torch.float32))
    if huge_kilobytes() == before:
        pytest.skip("this system gives no huge pages")
    assert huge_kilobytes() - before > 20_000
