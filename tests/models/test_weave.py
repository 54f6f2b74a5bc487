"""Parts of a pass: how they are cut, whose turn it is, and their attention, which equals that of whole rows."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any
from unittest import mock

import pytest
import torch

from tests.parallel.test_context import bounds, one_device, whole
from weft.layout.mesh import Mesh
from weft.layout.pending import Backlog
from weft.layout.token_order import moves
from weft.models import part_products
from weft.models.fused import project
from weft.models.part_attention import PartKeys
from weft.models.part_products import PartGradients, PartProducts
from weft.models.token_parts import PassTokens, TokenPart, by_phase, even, weaving
from weft.models.weave import WovenLayers
from weft.models.widened import multiply
from weft.parallel.build import connect, whole_model
from weft.recipe import ModelShape
from weft.techniques.overlaps.domino import Domino

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
    assert [*islice(by_phase(parts), 10)] == [0, 1, 0, 0, 1, 1, 0, 0, 0, 1]
    four = [TokenPart(0, 1, 0, 1)] * 4
    # half of the other parts compute between a part's products and its next entry
    turns = [0, 1, 2, 3, 0, 0, 1, 1, 2, 2, 0, 3, 3, 1, 0, 0, 2, 1, 1, 3]
    assert [*islice(by_phase(four), 20)] == turns


def test_weight_gradients_of_parts_are_those_of_the_whole() -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 6, 5, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(n, 5, dtype=torch.float64) for n in (3, 4, 2)]
    leaves = [w.requires_grad_(n < 2) for n, w in enumerate(weights)]
    scaled = (
        leaves[0] * 2
    )  # computed from a leaf, as a rank's rows of a whole weight are
    expected = project(x, scaled, *leaves[1:])
    loss = sum(y.sin().sum() for y in expected)
    wanted = torch.autograd.grad(loss, [x, *leaves[:2]])
    backlog = Backlog(1)
    backlog.travels = True
    products = PartProducts([leaves[0] * 2, *leaves[1:]], 3, backlog)
    parts = [products(part) for part in x.split([1, 3, 2], 1)]
    loss = sum(y.sin().sum() for part in parts for y in part)
    with mock.patch.object(part_products, "multiply", wraps=multiply) as product:
        given = torch.autograd.grad(loss, [x, *leaves[:2]])
    torch.testing.assert_close(given, wanted)
    # one for all parts of each weight that learns, which waited for a flight that never came
    assert product.call_count == 2 and len(backlog.calls) == 1
    assert products.gradients.totals == [None] * 3


def test_where_nothing_travels_the_backlog_does_not_grow_with_depth() -> None:
    """As with tp = 1 and experts on other ranks: no flight's backward would do what is left for later."""
    shape = ModelShape(vocab=7, layers=5, embed=8, heads=2, kv_heads=1, ffn=9)
    model = whole_model(shape, Mesh.single()).double().to_empty(device="cpu")
    connect(model, model.mesh, "none")
    torch.manual_seed(1)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    weights, add = [*model.parameters()], PartGradients.add
    tokens, positions = torch.randint(7, (2, 4)), torch.arange(4).expand(2, 4)

    def gradients(layers: int) -> tuple[torch.Tensor | None, ...]:
        ends = torch.tensor([0, 4, 8])
        logits = model(tokens, positions, ends, route=range(layers))
        return torch.autograd.grad(logits.sin().sum(), weights, allow_unused=True)

    def most_held(layers: int) -> int:
        """Largest number of groups of weights whose inputs and gradients are in memory at once."""
        groups, most = set[PartGradients](), [0]

        def added(group: PartGradients, *given: Any) -> None:
            add(group, *given)
            groups.add(group)
            most.append(sum(len(each._inputs) > 0 for each in groups))

        with mock.patch.object(PartGradients, "add", added):
            woven = gradients(layers)
        assert len(groups) == 4 * layers
        torch.testing.assert_close(woven, plain[layers], rtol=0, atol=1e-10)
        return max(most)

    plain = {layers: gradients(layers) for layers in (2, 5)}
    model.woven = WovenLayers(Domino(), 2, 0, False)
    assert most_held(2) == most_held(5) <= part_products.LEFT


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
