"""A mixture of experts in place of a feed-forward: a router, a stack of experts, and shared experts for all tokens."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from spmd_types import rules

from weft.layout.boundary import gather_tokens, scatter_tokens, untyped
from weft.layout.mesh import Mesh
from weft.models.feed_forward import ACTIVATE, SLOPE, FeedForward
from weft.models.fused import Tape, current_tape
from weft.models.graph_parts import Steps, current_part, read, result_of
from weft.models.module import Module
from weft.models.numbers import has_numbers
from weft.models.router import Choice, Router, RouterPass
from weft.models.widened import is_widened, multiply, widened
from weft.recipe import ModelShape
from weft.shapes.parameters import Table, layer_table

T = torch.Tensor


#: Function from a rank's own gate, up and down to stacks of other experts' weights.
Stacks = Callable[..., tuple[T, ...]]


class Dispatched(NamedTuple):
    """Rows of tokens for experts to compute on this rank, sorted by expert; a :class:`Dispatcher` makes it.

    Attributes:
        ``rows``: the rows, ``[rows, embed]``.
        ``counts``: the number of rows of each expert.
        ``meta``: the dispatcher's own data, which it needs to return the results.
        ``stacks``: None, if all rows are for experts of this rank. Otherwise a function from this rank's gate, up and
            down weights to the stacks of weights that the rows need.
    """

    rows: T
    counts: T
    meta: Any
    stacks: Stacks | None = None


#: Function that waits for tokens in transfer.
Arriving = Callable[[], Dispatched]


class Dispatcher(Protocol):
    """Interface of objects that send tokens to the ranks of their experts, and the experts' results back."""

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        """Begin to send the tokens ``x`` ``[tokens, embed]`` to the experts in ``choice``.

        Returns a function that waits for the rows that this rank receives for its experts, and returns them.
        """

    def combine(self, rows: T, meta: Any) -> Callable[[], T]:
        """Begin to return the experts' results ``rows`` to the ranks of their tokens.

        ``rows``: one result for each row that :meth:`dispatch` gave; ``meta``: the data that :meth:`dispatch` put into
        :class:`Dispatched` for this call. Returns a function that waits for the weighted sum of each token's experts,
        ``[tokens, embed]``.
        """


class Lender(Protocol):
    """Interface of objects that lend a rank copies of other ranks' expert weights, to compute with them."""

    def borrowed(self, *weights: T) -> Callable[[], tuple[T, ...]]:
        """Begin to fetch copies of the weights of other ranks' experts.

        ``weights``: this rank's stacks ``[experts, ...]`` of gate, up and down. Returns a function that waits for the
        copies: a stack of the borrowed experts for each of gate, up and down.
        """

    def learn_from(self, loads: Sequence[int]) -> None:
        """Record how many times the tokens of a training step were routed to each expert (``loads``)."""


class EarlyMixture(NamedTuple):
    """Work that a mixture of experts begins before attention.

    ``choice``: the experts that the router has chosen, if it runs early; ``lent``: a function that waits for the
    weights of other ranks' experts that are being fetched, if there are any.
    """

    choice: Choice | None
    lent: Callable[[], tuple[T, ...]] | None


class LocalExperts:
    """Dispatcher that communicates nothing: it sorts the rows by expert.

    ``here``: numbers of the experts of this rank; ``others``: whether tokens may also be routed to experts of other
    ranks, or be dropped by a full expert. Such routes add nothing to a token's sum.
    """

    def __init__(self, here: range, others: bool = False) -> None:
        self.here, self.others = here, others

    def dispatch(self, x: T, choice: Choice) -> Arriving:
        ids, count = choice.ids.flatten() - self.here.start, len(self.here)
        if self.others:
            ids = torch.where((ids >= 0) & (ids < count), ids, count)
        # of the choices, those of the first expert first and those elsewhere last
        order = ids.argsort(stable=True)
        counts = expert_counts(ids, count + 1)[:-1]
        rows = sum(sizes_of(counts, len(order))) if self.others else None
        dispatched = Dispatched(
            spread(x, order, choice.ids.shape[1], rows), counts, (order, choice.weights)
        )
        return lambda: dispatched

    def combine(self, rows: T, meta: Any) -> Callable[[], T]:
        return partial(weighted, rows, *meta)


def expert_counts(ids: T, experts: int) -> T:
    """Return how often each expert's number occurs in ``ids``: int64 ``[experts]``.

    ``experts``: the number of experts.
    """
    flat = ids.flatten()
    return torch.zeros(experts, dtype=torch.int64, device=ids.device).scatter_add(
        0, flat, torch.ones_like(flat)
    )


def spread(x: T, order: T, k: int, rows: int | None = None) -> T:
    """Copy each token to one row per expert that it is routed to: ``[tokens, embed]`` to ``[tokens * k, embed]``.

    ``k``: experts per token. A route is a pair of a token and one of its experts: route ``i`` belongs to token ``i //
    k``. ``order``: the routes in the order of the result's rows, usually sorted by expert. ``rows``: return only this
    many first rows; None: all.
    """
    return MovedRows.apply(
        x, partial(_choices, k=k), partial(_sums, k=k, places=len(x) * k), order[:rows]
    )


def reordered(rows: T, order: T) -> T:
    """Return ``rows[order]``, with a gradient that needs no atomic additions. ``rows``: ``[rows, embed]``; ``order``: a
    permutation of the rows' indices.
    """
    return spread(rows, order, 1)


def placed(rows: T, order: T, places: int | None = None) -> T:
    """Return a tensor whose row ``order[i]`` is row ``i`` of ``rows``; all rows that ``order`` does not name are zero.

    ``places``: number of rows of the result; None: as many as ``rows`` has.
    """
    places = len(rows) if places is None else places
    return MovedRows.apply(
        rows,
        partial(_sums, k=1, places=places),
        partial(_choices, k=1),
        order[: len(rows)],
    )


def weighted(rows: T, order: T, weights: T) -> T:
    """Return the weighted sum of each token's expert results: ``[tokens, embed]``, the counterpart of :func:`spread`.

    ``rows``: results of the experts in the order of :func:`spread`; ``order``: the permutation given to it;
    ``weights``: ``[tokens, k]``.
    """
    if len(rows) == weights.numel():
        return _Weighted.apply(rows, order, weights.to(rows.dtype))
    # [tokens, k, embed]
    each = placed(rows, order, weights.numel()).unflatten(0, weights.shape)
    return torch.einsum("tk,tkd->td", weights.to(rows.dtype), each)


class MovedRows(torch.autograd.Function):
    """Autograd function that moves rows by a linear map ``there``. Its transpose ``back`` moves their gradient.

    The result is ``there(rows, *orders)``, and the gradient of ``rows`` is ``back(grad, *orders)``. ``orders``: at most
    one index tensor, which both functions take.
    """

    @staticmethod
    def spmd_typecheck(*, rows, there, back, orders):  # type: ignore[no-untyped-def]
        same = "rde"[: rows.dim()]  # rows of tokens, or whole experts
        if orders:
            return rules.einsum("td,r->rd", rows, *orders)
        return rules.einsum(f"{same}->{same}", rows)

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
        slopes = torch.einsum("rd,rd->r", *widened(each, rows)).to(weights.dtype)
        d_weights = torch.empty_like(weights).flatten().index_copy_(0, order, slopes)
        d_rows = each.mul_(weights.flatten()[order, None])
        return d_rows, None, d_weights.view_as(weights)


def _choices(x: T, order: T, k: int) -> T:
    """Return the token of each choice in ``order``, with ``k`` choices per token."""
    return x.index_select(0, order // k)


def _sums(rows: T, order: T, k: int, places: int) -> T:
    """Each token's sum of rows in the order of its choices, not of the experts; 0 at ``places`` without a row."""
    if k > 1 and places == len(rows) and rows.dim() == 2 and rows.is_floating_point():
        return _bags(rows, order, k)
    make = rows.new_empty if places == len(rows) else rows.new_zeros
    each = make(places, *rows.shape[1:]).index_copy_(0, order, rows)
    return each.unflatten(0, (-1, k)).sum(1) if k > 1 else each


def _bags(rows: T, order: T, k: int, weights: T | None = None) -> T:
    """Return the sum of the ``k`` rows of each token, times their ``weights``; row ``i`` is choice ``order[i]``."""
    at = torch.empty_like(order).scatter_(
        0, order, torch.arange(len(order), device=order.device)
    )
    return F.embedding_bag(at.view(-1, k), rows, mode="sum", per_sample_weights=weights)


def feed_forwards(rows: T, counts: T, activation: str, gate: T, up: T, down: T) -> T:
    """Run each expert's feed-forward on its own rows: ``[rows, embed]`` to the same shape.

    ``rows``: sorted by expert; ``counts``: the number of rows of each expert; ``activation``: name of the activation
    function; ``gate, up``: ``[experts, hidden, embed]``; ``down``: ``[experts, embed, hidden]``.
    """
    if torch.is_inference_mode_enabled():
        return _forwards(rows, counts, activation, (gate, up, down)).out
    tape, weights = current_tape(), (gate, up, down)
    return _FeedForwards.apply(
        rows, counts, activation, None if tape is None else (tape, weights), *weights
    )


def sizes_of(counts: T, rows: int) -> list[int]:
    """Return the tensor ``counts``, the number of rows of each expert, as a list on the host.

    If ``counts`` has no values (on the meta device, or fake), the list has about equal counts that add up to ``rows``.
    """
    if not has_numbers(counts):
        share, rest = divmod(rows, max(1, len(counts)))
        return [share + (e < rest) for e in range(len(counts))]
    return counts.tolist()


def grouped_runs(x: T, *weights: T) -> bool:
    """Return whether PyTorch's ``grouped_mm`` can multiply ``x`` with these stacks of weights.

    It needs bfloat16, or on a CPU float32, and rows of a multiple of 16 bytes.
    """
    aligned = all(n * x.element_size() % 16 == 0 for w in weights for n in w.shape[1:])
    kinds = (torch.bfloat16,) if x.is_cuda else (torch.bfloat16, torch.float32)
    # What has no numbers is refused in float32.
    fits = (
        hasattr(F, "grouped_mm")
        and aligned
        and x.dtype in kinds
        and has_numbers(x)
        and len(x) > 0
    )
    return fits and not is_widened(x)


def product(x: T, weight: T, counts: T, out: T | None = None, add: bool = False) -> T:
    """Multiply ``x`` ``[rows, in]`` with the weights of one or several experts. Return ``[rows, out]``. No gradient is
    recorded.

    ``weight``: ``[in, out]`` of one expert, or ``[experts, in, out]``. With several experts the rows are sorted by
    expert, and ``counts`` has the number of rows of each; with one it is not used. ``out``: the tensor to write to;
    None: a new one. ``add``: add the product to ``out``, instead of overwriting it.
    """
    if weight.dim() == 2:
        return multiply(x, weight, plus=out if add else None, out=out)
    if grouped_runs(x, weight):
        y = F.grouped_mm(x, weight, offs=counts.cumsum(0, dtype=torch.int32))
        return y if out is None else out.add_(y) if add else out.copy_(y)
    out = x.new_empty(len(x), weight.shape[2]) if out is None else out
    sizes = sizes_of(counts, len(x))
    for some, w, into in zip(x.split(sizes), weight, out.split(sizes), strict=True):
        product(some, w, counts, into, add)
    return out


def gradient(grad: T, x: T, counts: T, out: T) -> None:
    """Write the gradient of a weight, ``grad.T @ x``, into ``out``; or the gradients of a stack of weights, one per
    expert.

    ``grad``: gradient of the weight's output, ``[rows, out]``; ``x``: the weight's input, ``[rows, in]``; ``out``:
    ``[out, in]`` for one weight, or ``[experts, out, in]`` for a stack. For a stack, rows are sorted by expert, and
    ``counts`` has the number of rows of each expert. For one weight ``counts`` is not used.
    """
    if out.dim() == 2:
        multiply(grad.t(), x, out=out)
        return
    sizes = sizes_of(counts, len(x))
    for some, rows, w in zip(grad.split(sizes), x.split(sizes), out, strict=True):
        gradient(some, rows, counts, w)


def add_gradient(parameter: T, gradient: T) -> None:
    """Add ``gradient`` to ``parameter.grad``; a gradient that is None becomes ``gradient`` itself."""
    parameter.grad = (
        gradient if parameter.grad is None else parameter.grad.add_(gradient)
    )


def runs_grouped(rows: T) -> bool:
    """Return whether one grouped product computes all experts of ``rows`` at once. This is the case only on a GPU.

    On a CPU one expert after the other is as fast, and an expert's hidden units are still in the cache when they are
    used.
    """
    return rows.is_cuda


class ExpertOutputs(NamedTuple):
    """Outputs of experts' feed-forwards.

    ``gate`` and ``up``: the products with these weights, ``[rows, hidden]``. ``out``: the result, ``[rows, embed]``.
    """

    gate: T
    up: T
    out: T


def forward_piece(
    x: T,
    counts: T,
    activation: str,
    weights: Sequence[T],
    places: Sequence[T | None] = (None, None, None),
) -> ExpertOutputs:
    """Run the feed-forward of one expert, or of a stack of experts, on the rows ``x`` ``[rows, embed]``.

    ``counts``: the number of rows of each expert of a stack; ``activation``: name of the activation function;
    ``weights``: gate, up and down, of the one expert or of the stack; ``places``: for gate output, up output and
    result, the tensor to write to; None: a new one.
    """
    gate, up, down = weights
    gate_out = product(x, gate.mT, counts, places[0])
    up_out = product(x, up.mT, counts, places[1])
    hidden = ACTIVATE[activation](gate_out).mul_(up_out)
    return ExpertOutputs(gate_out, up_out, product(hidden, down.mT, counts, places[2]))


def _forwards(
    rows: T, counts: T, activation: str, stacks: Sequence[T]
) -> ExpertOutputs:
    """Run the feed-forwards of all experts, each on its own rows."""
    if runs_grouped(rows):
        return forward_piece(rows, counts, activation, stacks)
    sizes, (_, hidden, embed) = sizes_of(counts, len(rows)), stacks[0].shape
    outputs = ExpertOutputs(
        *(rows.new_empty(len(rows), width) for width in (hidden, hidden, embed))
    )
    places = zip(*(y.split(sizes) for y in outputs), strict=True)
    for x, place, *weights in zip(rows.split(sizes), places, *stacks, strict=True):
        if len(x):
            forward_piece(x, counts, activation, weights, place)
    return outputs


def _backward(
    x: T,
    grad: T,
    gate_out: T,
    up_out: T,
    counts: T,
    activation: str,
    stacks: Sequence[T],
    d_x: T | None = None,
) -> tuple[T, tuple[tuple[T, T], ...]]:
    """Return the gradient of ``x``, in ``d_x`` if given, and for each weight the two factors of its gradient."""
    gate, up, down = stacks
    active, d_hidden = ACTIVATE[activation](gate_out), product(grad, down, counts)
    d_up, hidden = active * d_hidden, active.mul_(up_out)
    d_gate = SLOPE[activation](d_hidden.mul_(up_out), gate_out)
    d_x = product(d_gate, gate, counts, d_x)
    d_x = product(d_up, up, counts, d_x, add=True)
    return d_x, ((d_gate, x), (d_up, x), (grad, hidden))


class _FeedForwards(torch.autograd.Function):
    """:func:`feed_forwards`, which keeps two of the four hidden tensors that autograd would keep."""

    @staticmethod
    def spmd_typecheck(*, rows, counts, activation, later, stacks):  # type: ignore[no-untyped-def]
        rules.ignore(counts)
        gate, up, down = stacks
        gate_out, up_out = (rules.einsum("ri,eoi->ro", rows, w) for w in (gate, up))
        return rules.einsum(
            "ro,eio->ri", rules.einsum("ro,ro->ro", gate_out, up_out), down
        )

    @staticmethod
    def forward(ctx, rows, counts, activation, later, *stacks):  # type: ignore[no-untyped-def]
        gate_out, up_out, out = _forwards(rows, counts, activation, stacks)
        ctx.save_for_backward(rows, counts, gate_out, up_out, *stacks)
        # the parameters themselves, as in weft.models.fused
        ctx.activation, ctx.later = activation, later
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        rows, counts, gate_out, up_out, *stacks = ctx.saved_tensors
        tape, parameters = ctx.later or (Tape(), stacks)
        learning = [
            torch.empty_like(w) if asked else None
            for w, asked in zip(stacks, ctx.needs_input_grad[4:], strict=True)
        ]
        # A weight that came from another rank passes its gradient on.
        waiting = [ctx.later is not None and p.is_leaf for p in parameters]

        def learn(products: Sequence[tuple[T, T]], places: Sequence[T | None]) -> None:
            for pair, place, waits in zip(products, places, waiting, strict=True):
                if place is not None:
                    work = partial(gradient, *pair, counts, place)
                    tape.append(work) if waits else work()

        # of what is left for later no graph is made
        given = rows.detach(), grad.contiguous(), gate_out, up_out
        if runs_grouped(rows):
            d_rows, products = _backward(*given, counts, ctx.activation, stacks)
            learn(products, learning)
        else:
            sizes, d_rows = sizes_of(counts, len(rows)), torch.empty_like(rows)
            parts = zip(
                *(y.split(sizes) for y in (*given, d_rows)), *stacks, strict=True
            )
            for e, (x, g, a, b, d_x, *weights) in enumerate(parts):
                _, products = _backward(
                    x, g, a, b, counts, ctx.activation, weights, d_x
                )
                learn(products, [None if w is None else w[e] for w in learning])
        for i, (p, grad_of, waits) in enumerate(
            zip(parameters, learning, waiting, strict=True)
        ):
            if grad_of is not None and waits:
                tape.append(partial(add_gradient, p, grad_of))
                learning[i] = None
        return d_rows, None, None, None, *learning


class Experts(Module):
    """The routed experts of a layer, as stacks of gate, up and down weights with the hidden width ``expert_ffn``.

    This rank holds and computes its own shard of the stacks. ``shape``: shape of the model; ``mesh``: ranks that share
    the model; ``table``: descriptions of the model's parameters; ``path``: name of this module in the model.
    """

    def __init__(self, shape: ModelShape, mesh: Mesh, table: Table, path: str) -> None:
        super().__init__(mesh, table, path)
        self.activation = shape.activation
        for name in ("gate", "up", "down"):
            self.weight(name)

    @property
    def own(self) -> Sequence[T]:
        """The stacks ``[experts, ...]`` of gate, up and down that this rank holds."""
        return self.gate, self.up, self.down

    def forward(
        self, rows: T, counts: T, lent: Sequence[T] = (), stacks: Stacks | None = None
    ) -> T:
        """Run each expert on its rows, and return the results: ``[rows, embed]``.

        ``rows``: the tokens, sorted by expert, ``[rows, embed]``; ``counts``: the number of rows of each expert.
        ``lent``: stacks of weights of other ranks' experts, which are numbered after this rank's own. ``stacks``:
        function from this rank's gate, up and down weights to the stacks of weights that the rows need; None: this
        rank's weights are used as they are. If the layout cuts each expert over a mesh axis, a result is only a
        summand, and the caller must add up those of the axis's ranks.
        """
        own = self.own if stacks is None else stacks(*self.own)
        if not lent:
            return feed_forwards(rows, counts, self.activation, *own)
        with untyped():
            here = counts[: len(self.gate)]
            others = counts[len(self.gate) :][: len(lent[0])]
            share = len(rows) * len(here) // max(1, len(here) + len(others))
            size = sum(sizes_of(here, share))
        outputs = (
            feed_forwards(rows[:size], here, self.activation, *own),
            feed_forwards(rows[size:], others, self.activation, *lent),
        )
        return torch.cat(outputs)


class Mixture(Module):
    """A layer's mixture of experts: a router, routed experts, and shared experts that see all tokens.

    The setting ``shared_mix`` says how the results of routed and shared experts are combined. ``shape``: shape of the
    model; ``mesh``: ranks that share the model; ``layer``: index of the layer.
    """

    def __init__(self, shape: ModelShape, mesh: Mesh, layer: int) -> None:
        path = f"blocks.{layer}.ffn"
        super().__init__(mesh, layer_table(shape, layer), path)
        self.shape = shape
        self.router = Router(shape, mesh, layer, self.described)
        self.experts = Experts(shape, mesh, self.described, f"{path}.experts")
        here = range(shape.experts_of(layer))
        self.dispatcher: Dispatcher = LocalExperts(here, others=shape.capacity > 0)
        # that set out one behind the other
        self.pieces: Callable[[T, Choice], int] = lambda tokens, choice: 1
        self.copies: Lender | None = None
        self.shared = None
        if shape.shared_experts:
            self.shared = FeedForward(shape, mesh, self.described, f"{path}.shared")
            if shape.shared_mix != "add":
                self.weight("shared_gate")

    def early(self, x: T, whole: T, seen: RouterPass | None) -> EarlyMixture:
        """Begin the work that can run before attention: routing, if the router reads attention's input, and transfers
        of weights.

        The transfers fetch copies of other ranks' experts. ``x``: attention's input ``[batch, seq/tp, embed]``;
        ``whole``: the same input gathered over ``tp``; ``seen``: where the router records its counts.
        """
        if not self.shape.router_early:
            return self._begun()
        tokens = x if self.router.own else whole
        return self._begun(self.router(tokens.flatten(0, 1), seen))

    def _begun(self, choice: Choice | None = None) -> EarlyMixture:
        lent = None
        if self.copies is not None:
            lent = self.copies.borrowed(*self.experts.own)
        return EarlyMixture(choice, lent)

    def forward(
        self, x: T, seen: RouterPass | None = None, early: EarlyMixture | None = None
    ) -> T:
        """Map ``x`` ``[batch, seq/tp, embed]`` to the output of the same shape.

        ``seen``: where the router records its counts, None: nowhere. ``early``: the result of :meth:`early` for this
        pass; None if the method has not run.
        """
        return result_of(self.steps(x, seen, early))

    def steps(self, x: T, seen: RouterPass | None, early: EarlyMixture | None) -> Steps:
        """Compute the same as :meth:`forward`, as a generator. The caller can run other work whenever it yields. The
        generator returns the result.

        The arguments are those of :meth:`forward`. The generator yields before rows are sent to experts, and then while
        rows are in transfer. With experts cut over ``tp``, this rank computes the tokens of all ranks of ``tp``, as
        each of them has a part of every expert. With whole experts it routes only its own tokens.
        """
        if self.router.own:
            return (yield from self._steps(x, self.shared, seen, early))
        whole = gather_tokens(x, self.mesh)
        share = None if self.shared is None else self.shared.share
        total = yield from self._steps(whole, share, seen, early)
        return scatter_tokens(total, self.mesh)

    def _steps(
        self,
        x: T,
        shared: Callable[[T], T] | None,
        seen: RouterPass | None,
        early: EarlyMixture | None,
    ) -> Steps:
        """Routed experts, and beside their transfers the shared experts."""
        choice, lent = early or self._begun()
        choice, way = choice or self.router(x.flatten(0, 1), seen), self.dispatcher
        before = current_part()
        yield
        x, choice = read(x, before), Choice(read(choice.weights, before), choice.ids)
        tokens = x.flatten(0, 1)
        count = self.pieces(tokens, choice)
        split = (each.tensor_split(count) for each in (tokens, *choice))
        pieces = zip(*split, strict=True)
        arriving = [way.dispatch(piece, Choice(*chosen)) for piece, *chosen in pieces]
        beside = None if shared is None else shared(x)
        leaving = current_part()
        yield
        borrowed, returning = lent() if lent else (), []
        for arrived in arriving:
            rows, counts, meta, stacks = arrived()
            outputs = self.experts(rows, counts, borrowed, stacks)
            returning.append(way.combine(outputs, meta))
        yield
        sums = [back() for back in returning]
        routed = (torch.cat(sums) if len(sums) > 1 else sums[0]).view_as(x)
        return self.mixed(x, routed, None if beside is None else read(beside, leaving))

    def learn_from(self, loads: Sequence[int]) -> None:
        """Update the router and the lender of expert weights after a training step.

        ``loads``: how many times the step's tokens were routed to each expert.
        """
        self.router.learn_from(loads)
        if self.copies is not None:
            self.copies.learn_from(loads)

    def mixed(self, x: T, routed: T, shared: T | None) -> T:
        """Combine the results of routed and of shared experts to the layer's output, as the setting ``shared_mix``
        says. ``x``: the layer's input, from which the gate of the shared experts is computed. ``routed``, ``shared``:
        results of the experts; None: the layer has no shared experts. All tensors are ``[..., embed]``.
        """
        if shared is None or self.shape.shared_mix == "add":
            return routed if shared is None else routed + shared
        logits = F.linear(x, self.shared_gate)
        if self.shape.shared_mix == "gate":
            return routed + shared * logits.sigmoid()
        shares = logits.softmax(-1)
        return routed * shares[..., :1] + shared * shares[..., 1:]
