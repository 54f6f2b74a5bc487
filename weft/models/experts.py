"""A mixture of experts in the place of a feed-forward: a router, a stack of experts, and some that see all tokens."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from spmd_types import rules

from weft.layout.boundary import gather_tokens, scatter_tokens, untyped
from weft.layout.dims import Dim
from weft.layout.mesh import Mesh
from weft.models.feed_forward import ACTIVATE, FeedForward
from weft.models.fused import current_tape
from weft.models.module import Module
from weft.models.numbers import has_numbers
from weft.models.parts import Steps, current_part, read, result_of
from weft.models.router import Choice, Router, RouterPass
from weft.recipe import ModelShape

T = torch.Tensor


#: Makes stacks of other experts' weights of a rank's own gate, up and down.
Stacks = Callable[..., tuple[T, ...]]


class Dispatched(NamedTuple):
    """Rows of tokens in the order of the experts that are here: ``rows`` ``[rows, embed]``, ``counts`` of each.

    ``meta`` is what the dispatcher needs to bring them back. ``stacks``, where rows are for other experts than a rank
    has: what makes the stacks of their weights of its own.
    """

    rows: T
    counts: T
    meta: Any
    stacks: Stacks | None = None


#: Waits for tokens that are on their way.
Arriving = Callable[[], Dispatched]


class Dispatcher(Protocol):
    """Brings tokens to their experts and what these make of them back."""

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        """Let tokens ``x`` ``[tokens, embed]`` set out. What is computed before they are waited for runs meanwhile."""

    def combine(self, rows: T, meta: Any) -> Callable[[], T]:
        """Let rows set out for home; what is returned waits for each token's weighted sum: ``[tokens, embed]``."""


class Lender(Protocol):
    """Gives a rank the weights of other ranks' experts, for the rows that come after those of its own."""

    def borrowed(self, *weights: T) -> Callable[[], tuple[T, ...]]:
        """Let more rows of each of these stacks ``[experts, ...]`` set out; what is returned waits for them."""

    def learn_from(self, loads: Sequence[int]) -> None:
        """Take in how often each expert was chosen in a whole step."""


class EarlyMixture(NamedTuple):
    """What a mixture begins before attention: a router's choice, and weights of other ranks' experts on their way."""

    choice: Choice | None
    lent: Callable[[], tuple[T, ...]] | None


class LocalExperts:
    """The experts ``here`` are those that tokens get to: rows change only their order.

    ``others``: choices may be of experts elsewhere, or dropped; they count nothing in the sums.
    """

    def __init__(self, here: range, others: bool = False) -> None:
        self.here, self.others = here, others

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        ids, count = choice.ids.flatten() - self.here.start, len(self.here)
        if self.others:
            ids = torch.where((ids >= 0) & (ids < count), ids, count)
        order = ids.argsort(stable=True)  # of the choices, those of the first expert first and those elsewhere last
        counts = expert_counts(ids, count + 1)[:-1]
        rows = sum(sizes_of(counts, len(order))) if self.others else None
        found = Dispatched(spread(x, order, choice.ids.shape[1], rows), counts, (order, choice.weights))
        return lambda: found

    def combine(self, rows: T, meta: Any) -> Callable[[], T]:
        return partial(weighted, rows, *meta)


def expert_counts(ids: T, experts: int) -> T:
    """How often each expert is in ``ids``: int64 ``[experts]``."""
    flat = ids.flatten()
    return torch.zeros(experts, dtype=torch.int64, device=ids.device).scatter_add(0, flat, torch.ones_like(flat))


def spread(x: T, order: T, k: int, rows: int | None = None) -> T:
    """A row for each choice, ``k`` of each token, in ``order``: ``[tokens, embed]`` to ``[tokens * k, embed]``.

    ``rows``: of the first so many only.
    """
    return MovedRows.apply(x, partial(_choices, k=k), partial(_sums, k=k, places=len(x) * k), order[:rows])


def reordered(rows: T, order: T) -> T:
    """``rows[order]`` of a permutation."""
    return spread(rows, order, 1)


def placed(rows: T, order: T, places: int | None = None) -> T:
    """Row ``i`` at ``order[i]`` of so many ``places`` (default: as many as rows), and zeros elsewhere."""
    places = len(rows) if places is None else places
    return MovedRows.apply(rows, partial(_sums, k=1, places=places), partial(_choices, k=1), order[: len(rows)])


def weighted(rows: T, order: T, weights: T) -> T:
    """What the rows of :func:`spread` add up to for each token, by ``weights`` ``[tokens, k]``: ``[tokens, embed]``."""
    if len(rows) == weights.numel():
        return _Weighted.apply(rows, order, weights.to(rows.dtype))
    each = placed(rows, order, weights.numel()).unflatten(0, weights.shape)  # [tokens, k, embed]
    return torch.einsum("tk,tkd->td", weights.to(rows.dtype), each)


class MovedRows(torch.autograd.Function):
    """``there`` of rows, linear in them; ``back`` is its transpose, for the gradient. Both are given ``orders``."""

    @staticmethod
    def spmd_typecheck(*, rows, there, back, orders):  # type: ignore[no-untyped-def]
        same = "rde"[: rows.dim()]  # rows of tokens, or whole experts
        return rules.einsum("td,r->rd", rows, *orders) if orders else rules.einsum(f"{same}->{same}", rows)

    @staticmethod
    def forward(ctx, rows, there, back, *orders):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*orders)
        ctx.back, ctx.orders = back, len(orders)
        return there(rows, *orders)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return ctx.back(grad, *ctx.saved_tensors), None, None, *[None] * ctx.orders


class _Weighted(torch.autograd.Function):
    """:func:`weighted` of all rows, without a copy of them in the order of the tokens."""

    @staticmethod
    def spmd_typecheck(*, rows, order, weights):  # type: ignore[no-untyped-def]
        return rules.einsum("rd,r,tk->td", rows, order, weights)

    @staticmethod
    def forward(ctx, rows, order, weights):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rows, order, weights)
        return _bags(rows, order, weights.shape[1], weights)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        rows, order, weights = ctx.saved_tensors
        each = _choices(grad, order, weights.shape[1])  # [rows, embed]
        d_weights = torch.empty_like(weights).flatten().index_copy_(0, order, torch.einsum("rd,rd->r", each, rows))
        return each.mul_(weights.flatten()[order, None]), None, d_weights.view_as(weights)


def _choices(x: T, order: T, k: int) -> T:
    """The token of each choice in ``order``, of ``k`` choices each."""
    return x.index_select(0, order // k)


def _sums(rows: T, order: T, k: int, places: int) -> T:
    """Each token's rows added up, in the order of its choices and not of the experts; of distinct ``places``, or 0."""
    if k > 1 and places == len(rows) and rows.dim() == 2 and rows.is_floating_point():
        return _bags(rows, order, k)
    found = rows.new_empty if places == len(rows) else rows.new_zeros
    each = found(places, *rows.shape[1:]).index_copy_(0, order, rows)
    return each.unflatten(0, (-1, k)).sum(1) if k > 1 else each


def _bags(rows: T, order: T, k: int, weights: T | None = None) -> T:
    """The sum of the ``k`` rows of each token, of which row ``i`` is choice ``order[i]``; times their ``weights``."""
    at = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return F.embedding_bag(at.view(-1, k), rows, mode="sum", per_sample_weights=weights)


def products(x: T, counts: T, *weights: T) -> tuple[T, ...]:
    """``x @ weight[e].T`` for each weight, of the rows of each expert ``e``: so many as ``counts``, in turn.

    ``x``: ``[rows, in]``, weights ``[experts, out, in]``; each result ``[rows, out]``.
    """
    tape = current_tape()
    return _Products.apply(x, counts, None if tape is None else (tape, weights), *weights)


def sizes_of(counts: T, rows: int) -> list[int]:
    """``counts`` on the host; where there are no numbers, as if they were equal."""
    if not has_numbers(counts):
        share, rest = divmod(rows, max(1, len(counts)))
        return [share + (e < rest) for e in range(len(counts))]
    return counts.tolist()


def grouped_runs(x: T, *weights: T) -> bool:
    """Whether PyTorch's grouped product takes these: not float64, and rows of a multiple of 16 bytes."""
    aligned = all(n * x.element_size() % 16 == 0 for w in weights for n in w.shape[1:])
    kinds = (torch.bfloat16,) if x.is_cuda else (torch.bfloat16, torch.float32)
    # What has no numbers is refused in float32.
    return hasattr(F, "grouped_mm") and aligned and x.dtype in kinds and has_numbers(x) and len(x) > 0


def grouped(x: T, weight: T, counts: T, plus: T | None = None) -> T:
    """``[rows, in]`` and ``[experts, in, out]`` to ``[rows, out]`` (added to ``plus``), without a gradient."""
    if grouped_runs(x, weight) and (plus is None or x.is_cuda):
        found = F.grouped_mm(x, weight, offs=counts.cumsum(0, dtype=torch.int32))
        return found if plus is None else plus.add_(found)
    out, at = x.new_empty(len(x), weight.shape[2]) if plus is None else plus, 0
    for w, size in zip(weight, sizes_of(counts, len(x)), strict=True):
        rows = slice(at, at + size)
        torch.addmm(out[rows], x[rows], w, beta=0 if plus is None else 1, out=out[rows])
        at += size
    return out


def grouped_gradient(grad: T, x: T, counts: T, weight: T) -> T:
    """``grad.T @ x`` of each expert's rows: ``[rows, out]`` and ``[rows, in]`` to ``[experts, out, in]``."""
    out, at = torch.empty_like(weight), 0
    for w, size in zip(out, sizes_of(counts, len(x)), strict=True):
        torch.mm(grad[at : at + size].t(), x[at : at + size], out=w)
        at += size
    return out


def add_grouped_gradient(parameter: T, grad: T, x: T, counts: T) -> None:
    """``parameter.grad += grad.T @ x`` of each expert's rows."""
    found = grouped_gradient(grad, x, counts, parameter.detach())
    parameter.grad = found if parameter.grad is None else parameter.grad.add_(found)


class _Products(torch.autograd.Function):
    @staticmethod
    def spmd_typecheck(*, x, counts, later, weights):  # type: ignore[no-untyped-def]
        rules.ignore(counts)
        return tuple(rules.einsum("ri,eoi->ro", x, w) for w in weights)

    @staticmethod
    def forward(ctx, x, counts, later, *weights):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, counts, *weights)
        ctx.later = later  # the parameters themselves, as in weft.models.fused
        return tuple(grouped(x, w.mT, counts) for w in weights)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        x, counts, *weights = ctx.saved_tensors
        grads = tuple(g.contiguous() for g in grads)
        d_x: T | None = None
        for g, w in zip(grads, weights, strict=True):
            d_x = grouped(g, w, counts, d_x)
        tape, parameters = ctx.later or (None, weights)
        now: list[T | None] = []
        for p, g, w, learns in zip(parameters, grads, weights, ctx.needs_input_grad[3:], strict=True):
            # A weight that came from another rank passes its gradient on.
            if learns and tape is not None and p.is_leaf:
                tape.append(partial(add_grouped_gradient, p, g, x.detach(), counts))
                learns = False
            now.append(grouped_gradient(g, x, counts, w) if learns else None)
        return d_x, None, None, *now


class Experts(Module):
    """A stack of feed-forwards of width ``expert_ffn``; this rank computes with those that are its own."""

    def __init__(self, shape: ModelShape, mesh: Mesh, count: int) -> None:
        super().__init__(mesh)
        self.activate = ACTIVATE[shape.activation]
        assert shape.expert_ffn
        expert, ffn, embed = Dim("expert", count), Dim("ffn", shape.expert_ffn), Dim("embed", shape.embed)
        self.weight("gate", expert, ffn, embed, std=shape.init_std)
        self.weight("up", expert, ffn, embed, std=shape.init_std)
        self.weight("down", expert, embed, ffn, std=shape.init_std / (2 * shape.layers) ** 0.5)

    @property
    def own(self) -> tuple[T, T, T]:
        return self.gate, self.up, self.down

    def forward(self, rows: T, counts: T, lent: Sequence[T] = (), stacks: Stacks | None = None) -> T:
        """``[rows, embed]``, ``counts`` of each expert in turn, to each row's share of a sum over what cuts experts.

        ``lent``: the weights of those after this rank's own. ``stacks``: see :class:`Dispatched`.
        """
        own = self.own if stacks is None else stacks(*self.own)
        if not lent:
            return self._made(rows, counts, *own)
        with untyped():
            here, others = counts[: len(self.gate)], counts[len(self.gate) :][: len(lent[0])]
            size = sum(sizes_of(here, len(rows) * len(here) // len(counts)))
        made = self._made(rows[:size], here, *own), self._made(rows[size:], others, *lent)
        return torch.cat(made)

    def _made(self, rows: T, counts: T, gate: T, up: T, down: T) -> T:
        one, two = products(rows, counts, gate, up)  # [rows, hidden units here]
        return products(self.activate(one) * two, counts, down)[0]


class Mixture(Module):
    """Experts, and those that see all tokens, whose share of the sum ``shared_mix`` says."""

    def __init__(self, shape: ModelShape, mesh: Mesh, layer: int) -> None:
        super().__init__(mesh)
        self.shape, count = shape, shape.experts_of(layer)
        self.router = Router(shape, mesh, layer)
        self.experts = Experts(shape, mesh, count)
        self.dispatcher: Dispatcher = LocalExperts(range(count), others=shape.capacity > 0)
        self.pieces: Callable[[T, Choice], int] = lambda tokens, choice: 1  # that set out one behind the other
        self.copies: Lender | None = None
        self.shared = None
        if shape.shared_experts:
            width = shape.shared_experts * (shape.expert_ffn or 0)
            self.shared = FeedForward(shape, mesh, f"blocks.{layer}.ffn.shared", width, adapter=None)
            if shape.shared_mix != "add":
                rows = Dim("share", 1 if shape.shared_mix == "gate" else 2)
                self.weight("shared_gate", rows, Dim("embed", shape.embed), std=shape.init_std)

    def early(self, x: T, whole: T, seen: RouterPass | None) -> EarlyMixture:
        """What can begin before attention; its input is ``x``, and ``whole`` over ``tp``."""
        tokens = x if self.router.own else whole
        return self._begun(self.router(tokens.flatten(0, 1), seen) if self.shape.router_early else None)

    def _begun(self, choice: Choice | None = None) -> EarlyMixture:
        return EarlyMixture(choice, None if self.copies is None else self.copies.borrowed(*self.experts.own))

    def forward(self, x: T, seen: RouterPass | None = None, early: EarlyMixture | None = None) -> T:
        """``[batch, seq/tp, embed]`` to the same."""
        return result_of(self.steps(x, seen, early))

    def steps(self, x: T, seen: RouterPass | None, early: EarlyMixture | None) -> Steps:
        """:meth:`forward`, which may be left before rows set out and while they travel.

        Each rank of ``tp`` has a part of every expert, and so sees all tokens, or some whole experts and tokens.
        """
        if self.router.own:
            return (yield from self._steps(x, self.shared, seen, early))
        whole = gather_tokens(x, self.mesh)
        share = None if self.shared is None else self.shared.share
        return scatter_tokens((yield from self._steps(whole, share, seen, early)), self.mesh)

    def _steps(
        self, x: T, shared: Callable[[T], T] | None, seen: RouterPass | None, early: EarlyMixture | None
    ) -> Steps:
        """What chosen experts make of tokens, and what those that see all do, while rows travel to the former."""
        choice, lent = early or self._begun()
        choice, way = choice or self.router(x.flatten(0, 1), seen), self.dispatcher
        before = current_part()
        yield
        x, choice = read(x, before), Choice(read(choice.weights, before), choice.ids)
        tokens = x.flatten(0, 1)
        count = self.pieces(tokens, choice)
        pieces = zip(*(each.tensor_split(count) for each in (tokens, *choice)), strict=True)
        arriving = [way.dispatch(one, Choice(weights, ids)) for one, weights, ids in pieces]
        beside = None if shared is None else shared(x)
        leaving = current_part()
        yield
        borrowed, returning = lent() if lent else (), []
        for arrived in arriving:
            rows, counts, meta, stacks = arrived()
            returning.append(way.combine(self.experts(rows, counts, borrowed, stacks), meta))
        yield
        made = [back() for back in returning]
        routed = (torch.cat(made) if len(made) > 1 else made[0]).view_as(x)
        return self._mixed(x, routed, None if beside is None else read(beside, leaving))

    def learn_from(self, loads: Sequence[int]) -> None:
        """Take in how often each expert was chosen in a whole step."""
        self.router.learn_from(loads)
        if self.copies is not None:
            self.copies.learn_from(loads)

    def _mixed(self, x: T, routed: T, shared: T | None) -> T:
        if shared is None or self.shape.shared_mix == "add":
            return routed if shared is None else routed + shared
        logits = F.linear(x, self.shared_gate)
        if self.shape.shared_mix == "gate":
            return routed + shared * logits.sigmoid()
        shares = logits.softmax(-1)
        return routed * shares[..., :1] + shared * shares[..., 1:]


def feed_forward(shape: ModelShape, mesh: Mesh, layer: int) -> FeedForward | Mixture:
    """What a layer has after its attention."""
    if shape.experts_of(layer):
        return Mixture(shape, mesh, layer)
    assert shape.ffn
    return FeedForward(shape, mesh, f"blocks.{layer}.ffn", shape.ffn, shape.adapter)
