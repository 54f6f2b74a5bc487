"""A collective cut in two equals the whole one, and what lies between start and end runs while data travels."""

from typing import Any

import torch

from tests.test_counts import Recorder
from weft.layout.boundary import gather_tokens, scatter_tokens
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.pending import StartedCollective, start_gather, start_scatter

T = torch.Tensor


def passes(layout: dict[str, int]) -> dict[str, Any]:
    """Compute a norm region's entry and exit whole and in halves, with a product that belongs to neither between."""
    mesh = Mesh.create(Layout.model_validate(layout), "cpu")
    rank = mesh.rank("tp")
    x = torch.arange(2 * 3 * 4, dtype=torch.float64).view(2, 3, 4) * (rank + 1) / 7
    w = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4) * (rank + 2)
    results = dict[str, Any]()
    order = list[str]()
    land = StartedCollective.land

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
        with Recorder() as seen:
            (out.square().sum() + other.sum()).backward()
        results[name] = [out.detach(), leaf.grad, weight.grad]
    StartedCollective.land = land  # type: ignore[method-assign]
    sent = {name: count for name, count in seen.elements.items() if "c10d" in name}
    return {**results, "order": order, "sent": sent}


def test_halves_equal_the_whole_and_gradients_travel_beside_work(pool: Any) -> None:
    for seen in pool.run(2, passes, {"tp": 2}):
        for whole, halves in zip(seen["whole"], seen["halves"], strict=True):
            torch.testing.assert_close(halves, whole, rtol=0, atol=1e-12)
        # the gradient of the product between them is there before anybody waits
        assert seen["order"] == ["beside", "land", "land"]
        # gloo sums by an exchange of 2 x 6 x 4 elements, of which half stay, in place of an all-reduce of all of them
        assert seen["sent"] == {
            "c10d._allgather_base_": 2 * 6 * 4, "c10d.alltoall_base_": 2 * 6 * 4,
        }  # fmt: skip


def test_over_a_single_rank_nothing_is_started() -> None:
    x = torch.ones(1, 2, 3)
    assert start_gather(x, Mesh.single()).wait() is x
    assert start_scatter(x, Mesh.single()).wait() is x
