"""A collective cut in two equals the whole one, and what lies between start and end runs while data travels."""

from collections import defaultdict
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from weft.layout.boundary import gather_tokens, scatter_tokens
from weft.layout.flights import StartedCollective
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.pending import (
    Backlog,
    Pending,
    start_gather,
    start_scatter,
    working_beside,
)

T = torch.Tensor


def passes(layout: dict[str, int]) -> dict[str, Any]:
    """Compute a norm region's entry and exit whole and in halves, with a product that belongs to neither between."""
    mesh = Mesh.create(Layout.model_validate(layout), "cpu")
    rank = mesh.rank("tp")
    x = torch.arange(2 * 3 * 4, dtype=torch.float64).view(2, 3, 4) * (rank + 1) / 7
    w = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4) * (rank + 2)
    results = dict[str, Any]()
    order = list[str]()
    land, scatter, sent = StartedCollective.land, dist.scatter, 0
    routes = defaultdict[int, set[int]](set)

    def note(came: T, leaving: list[T] | None, group: Any, group_src: int, **how: Any) -> Any:  # fmt: skip
        nonlocal sent
        sent += sum(x.numel() for x in leaving or [])
        sent -= came.numel() * bool(leaving)
        routes[id(group)].add(group_src)
        return scatter(came, leaving, group=group, group_src=group_src, **how)

    def watched(flight: StartedCollective) -> T:
        order.append("land")
        return land(flight)

    for name in ("whole", "halves"):
        leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
        beside = leaf * 3
        if name == "whole":
            out = scatter_tokens(gather_tokens(leaf, mesh).sin() @ weight, mesh)
            other = (beside @ weight).cos()
        else:
            StartedCollective.land = watched  # type: ignore[method-assign]
            gathered = start_gather(leaf, mesh).wait()
            scattered = start_scatter(gathered.sin() @ weight, mesh)
            product = beside @ weight
            product.register_hook(lambda grad: order.append("beside"))
            other = product.cos()
            out = scattered.wait()
            order.clear()
        with mock.patch.object(dist, "scatter", note):
            (out.square().sum() + other.sum()).backward()
        results[name] = [out.detach(), leaf.grad, weight.grad]
    StartedCollective.land = land  # type: ignore[method-assign]
    senders = [sorted(sources) for sources in routes.values()]
    return {**results, "order": order, "sent": sent, "senders": sorted(senders)}


def test_halves_equal_the_whole_and_gradients_travel_beside_work(pool: Any) -> None:
    for seen in pool.run(2, passes, {"tp": 2}):
        for whole, halves in zip(seen["whole"], seen["halves"], strict=True):
            torch.testing.assert_close(halves, whole, rtol=0, atol=1e-12)
        # the gradient of the product between them is there before anybody waits
        assert seen["order"] == ["beside", "land", "land"]
        # gloo sums by an exchange of half of 2 x 6 x 4 elements, in place of an all-reduce of all of them
        assert seen["sent"] == 2 * (2 * 3 * 4)
        # nothing that a rank sends stands in front of its word that it is ready to receive
        assert seen["senders"] == [[0], [1]]


def test_over_a_single_rank_nothing_is_started() -> None:
    x = torch.ones(1, 2, 3)
    assert start_gather(x, Mesh.single()).wait() is x
    assert start_scatter(x, Mesh.single()).wait() is x


def test_what_nobody_waits_for_is_done_while_a_flight_lasts() -> None:
    backlog, ended = Backlog(2), list[int]()
    # nothing travels yet beside which it could be done
    backlog.add(partial(ended.append, 7))
    assert ended == [7] and not backlog.calls
    ended.clear()
    with working_beside(backlog):
        Pending(torch.ones(1), None, mock.Mock(), mock.Mock())
    for number in range(6):
        backlog.add(partial(ended.append, number))
    assert not ended
    flight = mock.Mock(has_ended=mock.Mock(side_effect=[False, False, True]))
    backlog.work_beside(flight)
    assert ended == [0, 1]
    # more would keep too much memory
    backlog.shorten()
    assert ended == [0, 1, 2, 3]
    backlog.work_beside(mock.Mock(has_ended=lambda: False))
    assert ended == [*range(6)]
