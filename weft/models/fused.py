"""Projections and RMSNorm with gradients written by hand.

PyTorch composes these of smaller operations, each of which writes a temporary as large as its input, and several
projections of one input each write a gradient that is then added to the others. Here results go where they are wanted.
"""

import torch
import torch.nn.functional as F
from spmd_types import rules

#: On the CPU ``torch.mm`` goes to MKL, and the operator that ``torch.compile`` uses for linear layers to oneDNN, which
#: was 10 to 15 % faster in float32 on an AMD EPYC.
ONEDNN = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")

T = torch.Tensor


def by_hand(x: T) -> bool:
    """Whether the gradients written here pay: not on GPUs, nor when the compiler fuses what is written plainly."""
    return x.device.type != "cuda" and not torch.compiler.is_compiling()


def times(x: T, weight: T, plus: T | None = None) -> T:
    """``x @ weight.T (+ plus)`` of ``[tokens, in]`` and ``[out, in]``, without a gradient."""
    if ONEDNN and x.device.type == "cpu" and x.dtype == torch.float32 and x.numel():
        linear = torch.ops.mkldnn._linear_pointwise
        return linear(x, weight, None, "none", [], "") if plus is None else linear(x, plus, weight, None, "add")
    return x @ weight.t() if plus is None else torch.addmm(plus, x, weight.t())


def project(x: T, *weights: T) -> tuple[T, ...]:
    """``x @ weight.T`` for every weight: ``[batch, seq, in]`` and ``[out, in]`` each to ``[batch, seq, out]`` each."""
    if not by_hand(x):
        return tuple(F.linear(x, w) for w in weights)
    return _Project.apply(x, *weights)


class _Project(torch.autograd.Function):
    @staticmethod
    def spmd_typecheck(*, x, weights):  # type: ignore[no-untyped-def]
        return tuple(rules.einsum("bsi,oi->bso", x, w) for w in weights)

    @staticmethod
    def forward(ctx, x, *weights):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, *weights)
        return tuple(times(x.flatten(0, 1), w).unflatten(0, x.shape[:2]) for w in weights)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        x, *weights = ctx.saved_tensors
        flat = [g.flatten(0, 1) for g in grads]
        d_x = times(flat[0], weights[0].t())
        for g, w in zip(flat[1:], weights[1:], strict=True):
            d_x = times(g, w.t(), plus=d_x)
        return d_x.view(x.shape), *(g.t() @ x.flatten(0, 1) for g in flat)


def rms_norm(x: T, scale: T, eps: float) -> T:
    """RMSNorm over the last dimension (Zhang & Sennrich 2019)."""
    if not by_hand(x) or x.dtype == torch.bfloat16:  # which F.rms_norm computes in float32
        return F.rms_norm(x, scale.shape, scale, eps)
    return _RmsNorm.apply(x, scale, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def spmd_typecheck(*, x, scale):  # type: ignore[no-untyped-def]
        return rules.einsum("..._,_->..._", x, scale)

    @staticmethod
    def forward(ctx, x, scale, eps):  # type: ignore[no-untyped-def]
        # 1 / root mean square, [..., 1]
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, inverse)
        return (x * inverse).mul_(scale)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, scale, inverse = ctx.saved_tensors
        # y = x * inverse * scale, and d inverse / dx = -inverse^3 * x / size.
        product = (grad * x).flatten(0, -2)
        d_scale = inverse.flatten() @ product
        pull = (product @ scale).view(inverse.shape).mul_(inverse.pow(3)).div_(-x.shape[-1])
        return (grad * scale).mul_(inverse).addcmul_(x, pull), d_scale, None
