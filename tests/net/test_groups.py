"""Groups that some ranks make alone have one name, however many groups each of these ranks is in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from weft.net.groups import new_group


def neighbours() -> list[float]:
    """Rank 1 is in more groups than the others; two groups have the same ranks."""
    rank, sums = dist.get_rank(), []
    for pair in ((0, 1), (0, 1), (1, 2), (0, 2), (1, 2)):
        if rank in pair:
            group = new_group(pair, f"of {pair}")
            total = torch.tensor(float(rank))
            dist.all_reduce(total, group=group)
            sums.append(total.item())
    return sums


@pytest.mark.slow(3)
def test_ranks_with_unequally_many_groups_make_a_group(pool: Any) -> None:
    found = pool.run(3, neighbours, timeout=60)
    assert found == [[1, 1, 2], [1, 1, 3, 3], [3, 2, 3]]
