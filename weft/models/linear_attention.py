"""Causal linear attention and retention over packed documents: one chunked kernel, forward and backward.

A head remembers what it has seen as one matrix, ``state = sum_j decay^(now - j) k_j v_j^T``, so that the cost of a
token does not grow with the number of earlier tokens. Linear attention (Katharopoulos et al. 2020, 2006.16236) has
decay 1, retention (Sun et al. 2023, 2307.08621) a fixed decay per head. Chunks of one token are the recurrent form, one
chunk is the parallel form; all chunk sizes give the same results. A document begins with an empty state, wherever it
begins in a row.

A *stretch* is a run of tokens of each row that one rank holds. A stretch is an element of a monoid: its state, and the
factor of an earlier state that remains after the stretch (:func:`state_to_state`). Under ``cp``,
:mod:`weft.models.prefix` combines the stretches of all ranks, and one product with the state before a stretch is added
to the stretch's outputs; backward does the same from the end.

Shapes: ``q, k: [rows, heads, tokens, dk]``, ``v: [rows, heads, tokens, dv]``, ``positions: [rows, tokens]`` within the
document, ``decay: [heads]`` as logarithms, states ``[rows, heads, dk, dv]``.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch

from weft.errors import UsageError
from weft.layout.mesh import Mesh
from weft.layout.sequence import chunk_owners
from weft.models.attention import (
    BACKWARD_SCHEMA,
    QkvGradients,
    fold_heads,
    repeat_heads,
    set_backward,
)
from weft.models.numbers import wide
from weft.models.prefix import StretchOwners, prefixes

T = torch.Tensor

#: Tokens of a chunk: larger chunks multiply more, smaller ones take more steps.
CHUNK = 64


def log_decay(mixer: str, heads: int) -> list[float]:
    """Return the logarithm of the decay per token, for each of ``heads`` heads.

    With ``mixer`` ``linear`` the logarithm is 0 (no decay); for retention the decays are 1 - 2^-5, 1 - 2^-6, ...
    """
    if mixer == "linear":
        return [0.0] * heads
    return torch.log1p(
        -torch.pow(2.0, -5.0 - torch.arange(heads, dtype=torch.float64))
    ).tolist()


def state_to_tokens(positions: T, decay: T) -> T:
    """Return, for each token of a stretch, how much of the state before the stretch enters the token's output: a
    factor, ``[rows, heads, tokens, 1]``.

    A stretch is a run of tokens of each row that one rank holds. The state is what linear attention keeps of a
    document's earlier tokens; it decays with each token. The factor is 0 for tokens of a document that begins in the
    stretch. ``positions``: position of each token in its document, ``[rows, tokens]``; ``decay``: logarithm of the
    decay per token, ``[heads]``.
    """
    i = torch.arange(positions.shape[1], device=positions.device)
    began_before = (positions > i)[:, None]
    return ((decay[:, None] * (i + 1)).exp() * began_before)[..., None]


def tokens_to_state(positions: T, decay: T) -> T:
    """Return, for each token of a stretch, how much of it is in the state after the stretch: a factor, ``[rows, heads,
    tokens, 1]``.

    A stretch is a run of tokens of each row that one rank holds. The state is what linear attention keeps of a
    document's earlier tokens; it decays with each token. The factor is 0 for tokens that are not of the stretch's last
    document. ``positions``: position of each token in its document, ``[rows, tokens]``; ``decay``: logarithm of the
    decay per token, ``[heads]``.
    """
    after = torch.arange(positions.shape[1] - 1, -1, -1, device=positions.device)
    same_document = (after <= positions[:, -1:])[:, None]
    return ((decay[:, None] * after).exp() * same_document)[..., None]


def state_to_state(positions: T, decay: T) -> T:
    """Return how much of the state before a stretch is left in the state after it: a factor, ``[rows, heads, 1, 1]``.

    A stretch is a run of tokens of each row that one rank holds. The state is what linear attention keeps of a
    document's earlier tokens; it decays with each token. The factor is 0 in rows where a document begins in the
    stretch. ``positions``: position of each token in its document, ``[rows, tokens]``; ``decay``: logarithm of the
    decay per token, ``[heads]``.
    """
    tokens = positions.shape[1]
    return ((decay * tokens).exp() * (positions[:, -1:] >= tokens))[..., None, None]


def tokens_to_tokens(positions: T, decay: T) -> T:
    """Return the factor of each token in the output of every later token: ``[rows, heads, later, earlier]``.

    The factor is 0 between tokens of different documents. ``positions``: position of each token in its document,
    ``[rows, tokens]``; ``decay``: logarithm of the decay per token, ``[heads]``.
    """
    i = torch.arange(positions.shape[1], device=positions.device)
    apart = i[:, None] - i
    visible = ((apart >= 0) & (apart <= positions[..., None]))[:, None]
    return (decay[:, None, None] * apart.clamp(min=0)).exp() * visible


def _chunks(positions: T, size: int) -> Iterator[tuple[slice, T]]:
    for lo in range(0, positions.shape[1], size):
        yield slice(lo, lo + size), positions[:, lo : lo + size]


def local_state(k: T, v: T, positions: T, decay: T) -> T:
    """Return what a stretch alone adds to the state of linear attention, ``[rows, heads, dk, dv]``: the state after the
    stretch if the state before it is zero.

    A stretch is a run of tokens of each row that one rank holds. The state is the decayed sum of the products of keys
    and values of a document's tokens. ``k, v``: ``[rows, heads, tokens, dk or dv]``; ``positions``: position of each
    token in its document, ``[rows, tokens]``; ``decay``: logarithm of the decay per token, ``[heads]``.
    """
    return (k * tokens_to_state(positions, decay)).mT @ v


def forward(q: T, k: T, v: T, positions: T, decay: T, size: int = CHUNK) -> T:
    """Return the outputs of linear attention for a stretch, without what earlier stretches add: ``[rows, heads, tokens,
    dv]``.

    A stretch is a run of tokens of each row that one rank holds. ``q, k, v``: ``[rows, heads, tokens, dk or dv]``;
    ``positions``: position of each token in its document, ``[rows, tokens]``; ``decay``: logarithm of the decay per
    token, ``[heads]``; ``size``: tokens of a chunk. Within a chunk attention is computed by a matrix of scores, and
    between chunks by a state.
    """
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    state: T | None = None
    for at, here in _chunks(positions, size):
        qc = q[:, :, at]
        kc = k[:, :, at]
        vc = v[:, :, at]
        out[:, :, at] = (qc @ kc.mT).mul_(tokens_to_tokens(here, decay)) @ vc
        fresh = local_state(kc, vc, here, decay)
        if state is not None:
            out[:, :, at] += (qc * state_to_tokens(here, decay)) @ state
            fresh += state * state_to_state(here, decay)
        state = fresh
    return out


def backward(
    grad: T, q: T, k: T, v: T, positions: T, decay: T, size: int = CHUNK
) -> QkvGradients:
    """Return the gradients of ``q``, ``k`` and ``v`` of :func:`forward`.

    ``grad``: the gradient of the outputs, ``[rows, heads, tokens, dv]``; ``positions``: position of each token in its
    document, ``[rows, tokens]``; ``decay``: logarithm of the decay per token, ``[heads]``; ``size``: tokens of a chunk.
    """
    dq = torch.empty_like(q)
    dk = torch.empty_like(k)
    dv = torch.empty_like(v)
    chunks = list(_chunks(positions, size))
    states = [q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])]
    for at, here in chunks[:-1]:
        kept = states[-1] * state_to_state(here, decay)
        states.append(local_state(k[:, :, at], v[:, :, at], here, decay).add_(kept))
    later = torch.zeros_like(states[0])  # the gradient of the state after the chunk
    for (at, here), state in zip(reversed(chunks), reversed(states), strict=True):
        gc = grad[:, :, at]
        qc = q[:, :, at]
        kc = k[:, :, at]
        vc = v[:, :, at]
        weights, into = tokens_to_tokens(here, decay), tokens_to_state(here, decay)
        from_before = state_to_tokens(here, decay)
        d_scores = (gc @ vc.mT).mul_(weights)
        dq[:, :, at] = (d_scores @ kc).add_((gc @ state.mT).mul_(from_before))
        dk[:, :, at] = (d_scores.mT @ qc).add_((vc @ later.mT).mul_(into))
        dv[:, :, at] = ((qc @ kc.mT).mul_(weights).mT @ gc).add_(
            (kc @ later).mul_(into)
        )
        later = (qc * from_before).mT @ gc + later * state_to_state(here, decay)
    return QkvGradients(dq, dk, dv)


def positions_of(cu_seqlens: Sequence[int], row: int, lo: int, hi: int) -> T:
    """Return the positions, in their documents, of the tokens ``lo:hi`` of every row: ``[rows, hi - lo]``.

    ``cu_seqlens``: where documents begin in the batch's flattened rows; ``row``: tokens of a row.
    """
    starts = torch.zeros(cu_seqlens[-1], dtype=torch.int64)
    for a, b in pairwise(cu_seqlens):
        starts[a:b] = a
    here = torch.arange(cu_seqlens[-1]) - starts
    return here.view(-1, row)[:, lo:hi]


class Cut(NamedTuple):
    """How rows of tokens are cut over ranks for linear attention, with tensors that follow from the cut. Each row is
    cut into stretches of equal length; a stretch is held by one rank.

    Attributes:
        ``places``: the rank that holds each stretch.
        ``size``: tokens of a stretch.
        ``positions``: for each stretch of this rank, by its index, the position of each of its tokens in its document.
        ``through``: for every stretch, the factor by which the state before it enters the state after it.
        ``decay``: logarithm of the decay per token, ``[heads]``.
    """

    places: StretchOwners
    size: int  # tokens of a stretch
    positions: dict[int, T]  # of the tokens of this rank's stretches, by stretch
    # of every stretch, how much of the state before it is in the one after it
    through: list[T]
    decay: T  # [heads], logarithms


@lru_cache(maxsize=16)
def _cut(
    cu: tuple[int, ...],
    owner: tuple[int, ...],
    index: int,
    held: int,
    decay: tuple[float, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Cut:
    """Return the cut of these rows: the same for all layers with this decay, forward and backward."""
    places = StretchOwners(owner, index)
    size = held // len(places.own)
    row = size * len(owner)
    if cu[0] != 0 or cu[-1] % row:
        raise UsageError(
            f"documents at {cu[0]} to {cu[-1]} do not fill rows of {row} tokens"
        )
    logs = torch.tensor(decay, dtype=dtype)
    positions = [
        positions_of(cu, row, s * size, (s + 1) * size) for s in range(len(owner))
    ]
    through = [state_to_state(p, logs).to(device) for p in positions]
    own = {s: positions[s].to(device) for s in places.own}
    return Cut(places, size, own, through, logs.to(device))


def _prepare(
    q: T,
    k: T,
    v: T,
    cu_seqlens: T,
    decay: Sequence[float],
    owner: Sequence[int],
    index: int,
) -> tuple[Cut, list[dict[int, T]]]:
    """Return the cut, and ``q``, ``k`` and ``v`` of own stretches, ``[rows, heads, tokens, head_dim]``, in wide
    precision.
    """
    dtype = wide(q.dtype)
    bounds, held = tuple(cu_seqlens.tolist()), q.shape[1]
    cut = _cut(bounds, tuple(owner), index, held, tuple(decay), dtype, q.device)
    group = q.shape[2] // k.shape[2]
    heads = (q, repeat_heads(k, group), repeat_heads(v, group))
    return cut, [_stretches(x, cut, dtype) for x in heads]


def _stretches(x: T, cut: Cut, dtype: torch.dtype) -> dict[int, T]:
    parts = x.to(dtype).transpose(1, 2).split(cut.size, dim=2)
    return dict(zip(cut.places.own, parts, strict=True))


def _joined(parts: dict[int, T], dtype: torch.dtype) -> T:
    return torch.cat([parts[s] for s in sorted(parts)], dim=2).transpose(1, 2).to(dtype)


@torch.library.custom_op("weft::linear_attention", mutates_args=())
def linear_attention(
    q: T,
    k: T,
    v: T,
    cu_seqlens: T,
    decay: Sequence[float],
    owner: Sequence[int],
    index: int,
    group: str,
    routine: str,
) -> tuple[T, T]:
    """Compute linear attention over packed documents, whose rows are cut into stretches over the ranks of ``group``.

    Returns ``out`` like ``q``, and the states before this rank's stretches.

    Args:
        ``q, k, v``: ``[batch, seq held, heads or kv_heads, head_dim]``.
        ``cu_seqlens``: boundaries of the documents in the flattened tokens of the whole rows.
        ``decay``: logarithms of the decay per token, one per head.
        ``owner``: rank that holds each stretch; it is the same for every row.
        ``index``: number of this rank.
        ``group``: name of the process group.
        ``routine``: how ranks exchange states (:func:`weft.models.prefix.prefixes`).
    """
    cut, (qs, ks, vs) = _prepare(
        q * q.shape[-1] ** -0.5, k, v, cu_seqlens, decay, owner, index
    )
    at, logs = cut.positions, cut.decay
    states = {s: local_state(ks[s], vs[s], at[s], logs) for s in at}
    before = prefixes(states, cut.through, cut.places, group, routine)
    outs = {}
    for s in at:
        outs[s] = forward(qs[s], ks[s], vs[s], at[s], logs)
        outs[s] += (qs[s] * state_to_tokens(at[s], logs)) @ before[s]
    return _joined(outs, q.dtype).contiguous(), torch.stack([before[s] for s in at])


@torch.library.custom_op(
    "weft::linear_attention_backward",
    mutates_args=(),
    schema=BACKWARD_SCHEMA.format(
        "Tensor before, Tensor cu_seqlens, float[] decay, SymInt[] owner, SymInt index, str group, str routine"
    ),
)
def linear_attention_backward(
    grad: T, q: T, k: T, v: T, before: T, cu_seqlens: T, decay: Sequence[float], owner: Sequence[int], index: int,
    group: str, routine: str,
) -> QkvGradients:  # fmt: skip
    """Return the gradients of ``q``, ``k`` and ``v`` of :func:`linear_attention`.

    ``grad``: the gradient of ``out``; ``before``: the states before this rank's stretches, from the forward pass. The
    other arguments are those of the forward pass.
    """
    scale = q.shape[-1] ** -0.5
    cut, (qs, ks, vs) = _prepare(q * scale, k, v, cu_seqlens, decay, owner, index)
    gs = _stretches(grad, cut, wide(q.dtype))
    at = cut.positions
    logs = cut.decay
    earlier = dict(zip(at, before, strict=True))
    weights = {s: state_to_tokens(at[s], logs) for s in at}
    # the gradient of the state before
    d_before = {s: (qs[s] * weights[s]).mT @ gs[s] for s in at}
    later = prefixes(d_before, cut.through, cut.places, group, routine, backward=True)
    grads: list[dict[int, T]] = [{}, {}, {}]
    for s in at:
        dq, dk, dv = backward(gs[s], qs[s], ks[s], vs[s], at[s], logs)
        into = tokens_to_state(at[s], logs)
        grads[0][s] = dq.add_((gs[s] @ earlier[s].mT).mul_(weights[s])).mul_(scale)
        grads[1][s] = dk.add_((vs[s] @ later[s].mT).mul_(into))
        grads[2][s] = dv.add_((ks[s] @ later[s]).mul_(into))
    joined = (
        fold_heads(_joined(grad_of, q.dtype), x.shape[2]).contiguous()
        for grad_of, x in zip(grads, (q, k, v), strict=True)
    )
    return QkvGradients(*joined)


@linear_attention.register_fake
def _(
    q: T,
    k: T,
    v: T,
    cu: T,
    decay: Sequence[float],
    owner: Sequence[int],
    index: int,
    *rest: str,
) -> tuple[T, T]:
    own = sum(who == index for who in owner)
    states = q.new_empty(
        own, q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=wide(q.dtype)
    )
    return q.new_empty(q.shape), states


set_backward(linear_attention, linear_attention_backward, kept=slice(1, None))


def linear_mixer(mesh: Mesh, decay: Sequence[float]) -> Callable[[T, T, T, T], T]:
    """Return the function that a layer of linear attention calls in place of softmax attention. The function maps
    ``q``, ``k``, ``v`` and ``cu_seqlens`` to the output. ``decay``: logarithms of the decay per token, one per head.
    The layout of ``mesh`` decides how rows are cut over ranks (``cp``) and how ranks exchange states (``scan``).
    """
    layout = mesh.layout
    group = ""
    index = 0
    owner = [0]
    if mesh.size("cp") > 1:
        group, index = mesh.group("cp").group_name, mesh.rank("cp")
        stretches = enumerate(chunk_owners(layout))
        held = sorted((s, who) for who, own in stretches for s in own)
        owner = [who for _, who in held]

    def mix(q: T, k: T, v: T, cu_seqlens: T) -> T:
        return linear_attention(
            q, k, v, cu_seqlens, decay, owner, index, group, layout.scan
        )[0]

    return mix
