"""Parts of a pass: how they are cut, whose turn it is, and their attention, which equals that of whole rows."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
import torch

from tests.parallel.test_context import bounds, one_device, whole
from weft.layout.token_order import moves
from weft.models.part_attention import PartKeys
from weft.models.token_parts import PassTokens, TokenPart, by_phase, even, weaving

DOCUMENTS = [[24], [3, 13, 8]]


@pytest.mark.parametrize("cuts", [(0, 10, 24), (0, 3, 4, 16, 24), (0, 24)])
@pytest.mark.parametrize("window", [0, 1, 5])
def test_attention_of_parts_is_that_of_rows(cuts: tuple[int, ...], window: int) -> None:
    cu, tensors = bounds(DOCUMENTS), whole(2, 24, (4, 2), torch.float64)
    expected = one_device(tensors, cu, window)
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    keys, outs = PartKeys(24), []
    for a, b in pairwise(cuts):
        keys.part = TokenPart(0, 2, a, b)
        outs.append(keys(q[:, a:b], k[:, a:b], v[:, a:b], cu, window))
    out = torch.cat(outs, 1)
    out.backward(tensors[3])
    assert not keys.kept
    for result, of_rows in zip((out, q.grad, k.grad, v.grad), expected, strict=True):
        torch.testing.assert_close(result, of_rows, rtol=0, atol=1e-12)


def test_cuts_are_whole_over_tp_and_leave_no_part_empty() -> None:
    tokens = PassTokens(rows=3, tokens=12, unit=4)
    assert [p.size for p in tokens.token_parts(even(2))] == [24, 12]
    assert len(tokens.token_parts(even(9))) == 3
    assert [p.size for p in tokens.row_parts((2, 1))] == [24, 12]
    assert PassTokens(3, 12, 4, cuts_tokens=False).token_parts(even(2)) == tokens.whole


def test_turns() -> None:
    parts = [TokenPart(0, 1, 0, 1)] * 2
    assert [*islice(weaving(parts), 7)] == [0, 0, 1, 0, 1, 0, 1]
    assert [*islice(by_phase(parts), 6)] == [0, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("back", [False, True])
def test_every_token_moves_to_its_place(back: bool) -> None:
    sizes, ranks = (9, 3, 6), 3
    rows = torch.arange(18).view(ranks, -1)
    cut = torch.cat([x.view(ranks, -1) for x in torch.arange(18).split(sizes)], 1)
    before, after = (cut, rows) if back else (rows, cut)
    ways = [moves(sizes, ranks, rank, back) for rank in range(ranks)]
    sent = [before[rank][way.leave].split(way.sent) for rank, way in enumerate(ways)]
    for rank, way in enumerate(ways):
        arrived = torch.cat([parts[rank] for parts in sent])
        assert way.received == [len(parts[rank]) for parts in sent]
        assert arrived[way.arrive].equal(after[rank])
