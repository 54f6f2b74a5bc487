"""A mixture of experts against a naive reference: every token through every expert, and a mask."""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from weft.data.batch import Batch
from weft.errors import UsageError
from weft.layout.mesh import Mesh
from weft.models import experts
from weft.models.experts import Mixture, feed_forwards, gradient, grouped_runs, product
from weft.models.feed_forward import ACTIVATE
from weft.models.init import initial_values
from weft.models.router import Loads, RouterPass
from weft.models.transformer import Transformer, feed_forward_module
from weft.models.widened import is_widened
from weft.recipe import ModelShape, build_recipe
from weft.shapes.parameters import parameter_count

T = torch.Tensor
SMALL = {
    "layers": 1,
    "embed": 8,
    "heads": 2,
    "ffn": 12,
    "init_std": 0.5,
    "experts": 6,
    "expert_ffn": 5,
    "vocab": 11,
}
#: Documents of 5, 1 and 7 tokens and padding, then one of 4 tokens and padding.
DOCUMENTS = [[0] * 5 + [1] + [2] * 7 + [-1] * 3, [4] * 4 + [-1] * 12]

MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2": {"router": "pre-softmax", "shared_experts": 2, "shared_mix": "gate"},
    "qwen3": {"router": "pre-softmax", "router_norm": True, "z_loss": 0.3},
    "deepseek-v2": {"router": "pre-softmax", "router_groups": 3, "router_top_groups": 2, "router_scale": 1.7,
                    "shared_experts": 1},
    "deepseek-v3": {"router": "sigmoid", "router_groups": 3, "router_top_groups": 2, "router_norm": True,
                    "router_scale": 2.5, "shared_experts": 1},
    "pr-moe": {"experts_per_token": 1, "router": "pre-softmax", "shared_experts": 1, "shared_mix": "residual"},
    "all experts": {"experts_per_token": 6, "activation": "relu"},
    "eight experts": {"experts": 8, "experts_per_token": 3},
    "two experts": {"experts": 2, "expert_ffn": 11, "shared_experts": 1},
    "one expert": {"experts": 1, "experts_per_token": 1},
    "step": {"balance": "step"},
    "hugging face": {"balance": "huggingface"},
    "capacity": {"capacity": 0.7, "experts_per_token": 3},
}  # fmt: skip


def mixture(**more: Any) -> Mixture:
    shape = ModelShape(**SMALL | {"balance_loss": 0.7} | more)
    made = feed_forward_module(shape, Mesh.single(), 0)
    assert isinstance(made, Mixture)
    made.to(torch.float64).to_empty(device="cpu")
    for path, module in made.named_modules():
        for name, logical in getattr(module, "logical", {}).items():
            values = initial_values(f"{path}.{name}", logical, logical.box, 3).double()
            if logical.everywhere:  # what a run would have learned by now
                values = torch.linspace(0.1, 0.3, logical.numel, dtype=torch.float64)
            getattr(module, name).data = values
            getattr(module, name).requires_grad_(not logical.everywhere)
    return made


def batch() -> Batch:
    documents = torch.tensor(DOCUMENTS)
    cu = torch.tensor([0, 5, 6, 13, 16, 20, 32], dtype=torch.int32)
    ids = torch.arange(32).view(2, 16) % 11
    positions = (torch.arange(32) - cu[:-1].repeat_interleave(cu.diff())).view(2, 16)
    return Batch(ids, ids, positions, cu, documents=documents)


def seen_by(m: Mixture) -> tuple[Loads, RouterPass]:
    loads = Loads(m.shape, Mesh.single())
    loads.begin(lambda: torch.tensor(17.0, dtype=torch.float64))
    return loads, loads.seen(batch())


def naive(m: Mixture, x: T) -> tuple[T, T, int]:
    """The output, the losses beside the model's, and how many choices are dropped."""
    shape, d = m.shape, x.shape[-1]
    tokens, k, count = x.reshape(-1, d), shape.experts_per_token, m.router.count
    logits = tokens @ m.router.table.t()
    scores = logits.sigmoid() if shape.router == "sigmoid" else logits.softmax(-1)
    weights = torch.zeros_like(logits)
    for t in range(len(tokens)):
        merit = scores[t].detach() + (m.router.bias if shape.router == "sigmoid" else 0)
        groups = merit.view(shape.router_groups, -1)
        best = (
            groups.sort(descending=True)
            .values[:, : 2 if shape.router == "sigmoid" else 1]
            .sum(-1)
        )
        allowed = best.argsort(descending=True)[: shape.router_top_groups].tolist()
        size = count // shape.router_groups
        order = [
            e for e in merit.argsort(descending=True).tolist() if e // size in allowed
        ][:k]
        chosen = (
            logits[t, order].softmax(-1)
            if shape.router == "post-softmax"
            else scores[t, order]
        )
        if shape.router_norm:
            chosen = chosen / chosen.sum()
        weights = weights.index_put(
            (torch.tensor([t]), torch.tensor(order)), chosen * shape.router_scale
        )
    act = {"silu": F.silu, "relu": F.relu}[shape.activation]
    each = torch.stack([
        (act(tokens @ m.experts.gate[e].t()) * (tokens @ m.experts.up[e].t())) @ m.experts.down[e].t()
        for e in range(count)
    ])  # fmt: skip
    documents, total = torch.tensor(DOCUMENTS).flatten(), 17.0
    kept, filled, dropped = weights.clone(), Counter[tuple[int, int]](), 0
    for t, one in enumerate(documents.tolist()):
        for e in (
            weights[t].nonzero().flatten().tolist()
            if shape.capacity and one >= 0
            else ()
        ):
            if filled[one, e] >= ceil(
                shape.capacity * k / count * int((documents == one).sum())
            ):
                kept[t, e], dropped = 0, dropped + 1
            filled[one, e] += 1
    y = torch.einsum("te,etd->td", kept, each)
    if m.shared is not None:
        s = (
            act(tokens @ m.shared.gate.t()) * (tokens @ m.shared.up.t())
        ) @ m.shared.down.t()
        if shape.shared_mix == "add":
            y = y + s
        elif shape.shared_mix == "gate":
            y = y + s * (tokens @ m.shared_gate.t()).sigmoid()
        else:
            c = (tokens @ m.shared_gate.t()).softmax(-1)
            y = y * c[:, :1] + s * c[:, 1:]
    loss = torch.zeros((), dtype=torch.float64)
    p = scores / scores.sum(-1, keepdim=True)
    for one in (0, 1, 2, 4):
        mine = documents == one
        share = (weights[mine] > 0).double().sum(0) / mine.sum()  # of the tokens
        if shape.balance != "huggingface":
            share = share / k
        if shape.balance == "step":
            share = m.router.load
        loss = loss + 0.7 * count * (share.detach() * p[mine].sum(0)).sum() / total
    loss = (
        loss + shape.z_loss * (logits[documents >= 0].logsumexp(-1) ** 2).sum() / total
    )
    return y.view_as(x), loss, dropped


@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_a_naive_mixture(model: str) -> None:
    m = mixture(**MODELS[model])
    x = torch.randn(
        2, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    want = torch.randn(
        2, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    learning = {name: p for name, p in m.named_parameters() if p.requires_grad}
    y, loss, dropped = naive(m, x)
    expected = torch.autograd.grad((y * want).sum() + loss, [x, *learning.values()])
    loads, seen = seen_by(m)
    found = m(x, seen)
    assert loads.share()[m.router.count :].tolist() == [dropped] * (
        m.shape.capacity > 0
    )
    assert (dropped > 3) is (model == "capacity")
    torch.testing.assert_close(found, y, rtol=1e-12, atol=1e-12)
    (found * want).sum().backward()
    grads = [x.grad, *(p.grad for p in learning.values())]
    for name, g, e in zip(["x", *learning], grads, expected, strict=True):
        torch.testing.assert_close(
            g, e, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_padding_and_a_second_run_never_count() -> None:
    m = mixture(router="sigmoid")
    loads, seen = seen_by(m)
    x = torch.randn(2, 16, 8, dtype=torch.float64)
    m(x, seen)
    once = loads.share().tolist()
    m(x, seen)  # as recomputation does
    assert loads.share().tolist() == once
    assert sum(once) == 17 * 2 and all(n == round(n) for n in once)
    m(x)  # as evaluation does
    assert loads.share().tolist() == once
    loads.begin(lambda: torch.tensor(1.0))
    assert not loads.share().any()


def test_a_batch_of_padding_has_no_loss_and_works() -> None:
    m = mixture(z_loss=0.5)
    loads = Loads(m.shape, Mesh.single())
    loads.begin(lambda: torch.tensor(0.0))
    one = batch()
    seen = loads.seen(
        Batch(
            one.tokens,
            one.labels,
            one.positions,
            one.cu_seqlens,
            documents=one.tokens * 0 - 1,
        )
    )
    x = torch.randn(2, 16, 8, dtype=torch.float64, requires_grad=True)
    (m(x, seen) * 0).sum().backward()
    assert not loads.share().any() and not m.router.table.grad.any()


@pytest.mark.parametrize("shape", [(0, 8), (3, 8)])
def test_no_tokens_and_experts_without_any(shape: tuple[int, int]) -> None:
    m = mixture(experts=6, experts_per_token=1)
    x = torch.zeros(1, *shape, dtype=torch.float64, requires_grad=True)
    m(x).sum().backward()
    assert m.experts.down.grad.shape == (6, 8, 5) and torch.isfinite(x.grad).all()


def test_bias_moves_by_the_loads_of_a_step() -> None:
    m = mixture(router="sigmoid", bias_rate=0.125)
    before = m.router.bias.detach().clone()
    m.router.learn_from([9, 1, 5, 5, 5, 5])
    assert torch.equal(
        m.router.bias - before, torch.tensor([-0.125, 0.125, 0, 0, 0, 0]).double()
    )


def test_groups_are_left_out_with_negative_scores() -> None:
    """A fill of zero would choose from groups that are left out when biases are below zero."""
    m = mixture(router="sigmoid", router_groups=3, router_top_groups=1)
    m.router.bias.data.fill_(-3)
    ids = m.router(torch.randn(64, 8, dtype=torch.float64), None).ids
    assert ((ids // 2) == (ids[:, :1] // 2)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_is_that_of_the_loop(dtype: torch.dtype) -> None:
    x, w = torch.randn(13, 8, dtype=dtype), torch.randn(4, 8, 16, dtype=dtype)
    counts = torch.tensor([5, 0, 7, 1])
    assert grouped_runs(x, w) != is_widened(x)
    loop = torch.cat(
        [part @ one for part, one in zip(x.split(counts.tolist()), w, strict=True)]
    )
    torch.testing.assert_close(product(x, w, counts), loop)
    grad = torch.randn(13, 16, dtype=dtype)
    parts = zip(grad.split(counts.tolist()), x.split(counts.tolist()), strict=True)
    found = torch.empty_like(w.mT)
    gradient(grad, x, counts, found)
    torch.testing.assert_close(found, torch.stack([g.t() @ one for g, one in parts]))


@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("together", [False, True])
def test_experts_have_the_gradients_of_autograd(
    activation: str, dtype: torch.dtype, together: bool
) -> None:
    """One expert at a time, as on the CPU, and all ``together``, as on a GPU; also where some are given no row."""
    generator, counts = torch.Generator().manual_seed(5), torch.tensor([5, 0, 7, 1])
    shapes = (13, 8), (4, 16, 8), (4, 16, 8), (4, 8, 16)
    given = [
        torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()
        for shape in shapes
    ]

    def plain(rows: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        made = []
        for x, gate, up, down in zip(
            rows.split(counts.tolist()), *weights, strict=True
        ):
            made.append((ACTIVATE[activation](x @ gate.t()) * (x @ up.t())) @ down.t())
        return torch.cat(made)

    def ours(rows: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return feed_forwards(rows, counts, activation, *weights)

    expected, grad = plain(*given), torch.randn(13, 8, generator=generator, dtype=dtype)
    with mock.patch.object(experts, "runs_grouped", lambda rows: together):
        found = ours(*given)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.autograd.grad(found, given, grad),
            torch.autograd.grad(expected, given, grad),
        )
        with torch.inference_mode():
            assert torch.equal(ours(*given), found)


@pytest.mark.parametrize("more", [
    {}, {"first_dense": 1, "moe_every": 2}, {"experts": [0, 2, 6, 4], "experts_per_token": 2},
    {"router": "sigmoid", "shared_experts": 1, "shared_mix": "residual", "balance": "step"},
    {"shared_experts": 2, "shared_mix": "gate", "router_early": True},
])  # fmt: skip
def test_parameters_are_counted(more: dict[str, Any]) -> None:
    shape = ModelShape(**SMALL | {"layers": 4} | more)
    model = Transformer(shape, Mesh.single())
    assert sum(
        p.numel() for p in model.parameters() if p.requires_grad
    ) == parameter_count(shape, 11)
    assert (
        len(
            {
                p.ffn.router.count
                for p in model.blocks.values()
                if isinstance(p.ffn, Mixture)
            }
        )
        >= 1
    )


@pytest.mark.parametrize(("more", "line"), [
    ({"experts_per_token": 7}, "experts_per_token = 7 is more than the 6 experts that a token can choose from"),
    ({"router_groups": 4}, "6 experts do not make router_groups = 4 equal groups"),
    ({"router_groups": 12, "router_top_groups": 2}, "6 experts do not make router_groups = 12 equal groups"),
    ({"router_groups": 2, "router_top_groups": 3}, "router_top_groups = 3 is more than the router_groups = 2"),
    ({"router_groups": 3, "experts_per_token": 3}, "more than the 2 experts that a token can choose from"),
    ({"experts": [6, 6]}, "experts has 2 entries for layers = 1"),
    ({"layers": 2, "experts": [6, 4], "balance": "huggingface", "balance_loss": 1.0}, "equally many experts"),
    ({"first_dense": 1}, r"experts = 6 are in none of layers = 1 with first_dense = 1 and moe_every = 1; lower these"),
    ({"layers": 2, "first_dense": 3}, "experts = 6 are in none of layers = 2 with first_dense = 3"),
    ({"moe_every": 2}, "in none of layers = 1 with first_dense = 0 and moe_every = 2"),
    ({"router": "softmax"}, "router = 'softmax' is not possible"),
    ({"experts": -1}, r"model\.experts = -1: it should be"),
])  # fmt: skip
def test_impossible_experts_are_one_line(more: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line) as error:
        build_recipe({"model": SMALL | more})
    assert "\n" not in str(error.value)
