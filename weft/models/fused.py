"""Projections and RMSNorm whose gradients are written by hand.

PyTorch composes them of smaller operations, each of which writes a temporary as large as its input. If several
projections have the same input, each also writes a gradient of the input, and these are then added. Here results are
written to their final tensor at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
import torch.nn.functional as F
from spmd_types import rules

from weft.models.invariant import TILE, is_invariant
from weft.models.numbers import has_numbers
from weft.models.widened import MULTIPLIED_SLOWLY, multiply

#: On the CPU ``torch.mm`` goes to MKL, and the operator that ``torch.compile`` uses for linear layers to oneDNN, which
#: was 10 to 15 % faster in float32 on an AMD EPYC.
ONEDNN = (
    torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability().startswith("AVX")
)

T = torch.Tensor

#: Deferred weight gradients of backward, as calls that add them to ``.grad``.
Tape = list[Callable[[], None]]


class ImmediateTape(Tape):
    """A tape that runs each call when it is appended, so that backward adds weight gradients to ``.grad`` at once.

    Other tapes are plain lists of such calls, which run later.
    """

    def append(self, call: Callable[[], None]) -> None:
        """Run ``call`` at once, in place of keeping it for later."""
        call()


def run_tape(tape: Tape) -> None:
    """Run the calls on ``tape`` in order, and empty the tape.

    A tape is a list of calls, each of which adds a weight gradient to ``.grad``. A call holds tensors as large as
    activations, so it is taken off the tape as soon as it has run. Otherwise their memory would be freed late, by
    garbage collection, because call and tape refer to each other.
    """
    tape.reverse()
    while tape:
        tape.pop()()


_tape: ContextVar[Tape | None] = ContextVar("tape", default=None)


@contextmanager
def deferred(tape: Tape | None) -> Iterator[None]:
    """Return a context in which backward leaves the weight gradients of projections for later: it appends calls that
    compute them to ``tape``.

    Backward then has the gradient of a projection's input earlier (Qi et al. 2023). The caller may run the calls at any
    later time. If ``tape`` is None, or under ``torch.compile``, backward computes both gradients at once, as usual.
    """
    token = _tape.set(tape)
    try:
        yield
    finally:
        _tape.reset(token)


def current_tape() -> Tape | None:
    """Return the tape of the surrounding :func:`deferred`; None outside such a context."""
    return _tape.get()


def own_gradients_pay(x: T) -> bool:
    """Return whether hand-written gradients are faster than autograd's for ``x``: not on GPUs, nor under a compiler."""
    return x.device.type != "cuda" and not torch.compiler.is_compiling()


def times(x: T, weight: T, plus: T | None = None) -> T:
    """Return ``x @ weight.T``, or ``x @ weight.T + plus``. No gradient is recorded.

    ``x``: ``[tokens, in]``; ``weight``: ``[out, in]``; ``plus``: ``[tokens, out]``.
    """
    if is_invariant() and plus is None and len(x) not in (0, TILE):
        from weft.models.invariant_kernels import by_tiles

        return by_tiles(lambda tile: times(tile, weight), x)
    # Only for usual sizes, where it pays: this call is under suspicion for two sporadic crashes of float32 ranks.
    plain = x.device.type == "cpu" and x.dtype == torch.float32 and x.numel()
    if ONEDNN and plain and has_usual_sizes(weight) and has_numbers(x):
        linear = torch.ops.mkldnn._linear_pointwise
        if plus is None:
            return linear(x, weight, None, "none", [], "")
        return linear(x, plus, weight, None, "add")
    return multiply(x, weight.t(), plus)


def has_usual_sizes(weight: T) -> bool:
    """Return whether both dimensions of ``weight`` are multiples of 16, and at least 64.

    For such weights oneDNN's own product is used.
    """
    return min(weight.shape) >= 64 and not any(n % 16 for n in weight.shape)


def project(x: T, *weights: T) -> tuple[T, ...]:
    """Return ``x @ weight.T`` for every weight, with gradients.

    ``x``: ``[batch, seq, in]``; each weight: ``[out, in]``; each result: ``[batch, seq, out]``.
    """
    tape = _tape.get()
    if torch.compiler.is_compiling() or (tape is None and not own_gradients_pay(x)):
        return tuple(_linear(x, w) for w in weights)
    # a function of autograd's costs as much as a small product
    if torch.is_inference_mode_enabled():
        return _products(x, weights)
    later = None if tape is None else (tape, weights)
    return _Project.apply(x, later, *weights)


def _products(x: T, weights: Sequence[T]) -> tuple[T, ...]:
    """Return the products of :func:`project`, without a gradient."""
    rows = x.flatten(0, 1)  # [batch * seq, in]
    return tuple(times(rows, w).unflatten(0, x.shape[:2]) for w in weights)


def _linear(x: T, weight: T) -> T:
    """``x @ weight.T`` with autograd's gradients, for a compiler to fuse."""
    if x.device.type == "cpu" and x.dtype in MULTIPLIED_SLOWLY:
        return F.linear(x.float(), weight.float()).to(x.dtype)
    return F.linear(x, weight)


class _Project(torch.autograd.Function):
    @staticmethod
    def spmd_typecheck(*, x, later, weights):  # type: ignore[no-untyped-def]
        return tuple(rules.einsum("bsi,oi->bso", x, w) for w in weights)

    @staticmethod
    def forward(ctx, x, later, *weights):  # type: ignore[no-untyped-def]
        # Frozen weights need no input, and an input that nothing before it learns from needs no weights.
        of_x, _, *of_weights = ctx.needs_input_grad
        ctx.save_for_backward(
            x if any(of_weights) else None,
            *(weights if of_x else [None] * len(weights)),
        )
        # the parameters themselves: what is saved for recompute is a copy without their .grad
        ctx.later = later
        return _products(x, weights)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        x, *weights = ctx.saved_tensors
        d_x: T | None = None
        flat = [g.flatten(0, 1) for g in grads]
        if ctx.needs_input_grad[0]:
            d_x = times(flat[0], weights[0].t())
            for g, w in zip(flat[1:], weights[1:], strict=True):
                d_x = times(g, w.t(), plus=d_x)
            d_x = d_x.view(*grads[0].shape[:2], -1)
        if x is not None:
            x = x.detach().flatten(0, 1)
        tape, parameters = ctx.later or (None, weights)
        now: list[T | None] = []
        for p, g, learns in zip(
            parameters, flat, ctx.needs_input_grad[2:], strict=True
        ):
            # A weight that was computed from a parameter passes its gradient on, and that is the parameter's.
            if learns and tape is not None and p.is_leaf:
                tape.append(partial(add_product, p, g, x))
                learns = False
            now.append(multiply(g.t(), x) if learns else None)
        return d_x, None, *now


def add_product(weight: T, grad: T, x: T) -> None:
    """Add ``grad.T @ x`` to ``weight.grad``.

    ``grad``: ``[tokens, out]``; ``x``: ``[tokens, in]``; ``weight``: ``[out, in]``.
    """
    if weight.grad is None:
        weight.grad = multiply(grad.t(), x)
    else:
        multiply(grad.t(), x, plus=weight.grad, out=weight.grad)


def rms_norm(x: T, scale: T, eps: float) -> T:
    """Return ``x`` after RMSNorm over its last dimension (Zhang & Sennrich 2019).

    ``scale``: trained factor of each channel. ``eps``: constant added to the mean square.
    """
    # which F.rms_norm computes in float32
    if not own_gradients_pay(x) or x.dtype == torch.bfloat16:
        return F.rms_norm(x, scale.shape, scale, eps)
    if torch.is_inference_mode_enabled():
        return (x * inverse_root_mean_square(x, eps)).mul_(scale)
    return _RmsNorm.apply(x, scale, eps)


def inverse_root_mean_square(x: T, eps: float) -> T:
    """Return ``1 / sqrt(mean(x^2) + eps)`` over the last dimension: ``[..., size]`` to ``[..., 1]``."""
    return (
        torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        .square_()
        .div_(x.shape[-1])
        .add_(eps)
        .rsqrt_()
    )


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def spmd_typecheck(*, x, scale):  # type: ignore[no-untyped-def]
        return rules.einsum("..._,_->..._", x, scale)

    @staticmethod
    def forward(ctx, x, scale, eps):  # type: ignore[no-untyped-def]
        inverse = inverse_root_mean_square(x, eps)
        ctx.save_for_backward(x, scale, inverse)
        return (x * inverse).mul_(scale)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, scale, inverse = ctx.saved_tensors
        # y = x * inverse * scale, and d inverse / dx = -inverse^3 * x / size.
        product = (grad * x).flatten(0, -2)
        d_scale = inverse.flatten() @ product
        pull = (
            (product @ scale)
            .view(inverse.shape)
            .mul_(inverse.pow(3))
            .div_(-x.shape[-1])
        )
        return (grad * scale).mul_(inverse).addcmul_(x, pull), d_scale, None
