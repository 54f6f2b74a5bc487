"""State that islands keep for each parameter, and its transfer to an island that joins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING

import torch

from weft.sync.compress import build_compressor
from weft.sync.compressor import Compressor

if TYPE_CHECKING:
    from weft.parallel.state import Held, State
    from weft.recipe import Sync
    from weft.sync.streams import Streams

T = torch.Tensor


def slots_of(how: Sync) -> tuple[str, ...]:
    """Return the names of the slots that islands add to every parameter.

    They are the method's own; ``answer``, the result of an exchange that is not applied yet; and with compression the
    residuals of error feedback: of the messages sent ``up``, and of the means sent back ``down``.
    """
    method, (there, back) = how.method, compressors(how)
    names = [*method.slots, *(["answer"] if method.late or how.delay else [])]
    if how.compress != "none":
        names += ["up"] * (not there.unbiased) + ["down"] * (
            not back.unbiased and not there.in_rings
        )
    return tuple(names)


def compressors(how: Sync) -> tuple[Compressor, Compressor]:
    """Return the compressor of what islands send, and that of what they receive."""
    return build_compressor(how.compress), build_compressor(
        how.compress_back or how.compress
    )


def add_slots(state: State, how: Sync) -> None:
    """Give every parameter that learns its slots, in float32 or in its own type if that is wider."""
    if how.of_gradients:
        return
    for h in state.learning:
        here = h.local.detach().to("cpu", wider(h.local), copy=True)
        for name in slots_of(how):
            h.slots[name] = h.part(here if name == "anchor" else torch.zeros_like(here))


def values_of(h: Held, slot: str) -> T:
    """Return one of a parameter's slots, or with "" the parameter, as this rank holds them."""
    return h.slots[slot].values if slot else h.local.detach()


def flat_values(held: Sequence[Held], slot: str = "") -> T:
    """Return the parameters, or one of their slots, end to end as a copy on the host."""
    flats = [values_of(h, slot) for h in held]
    return (
        torch.cat([x.flatten().to("cpu", wider(x)) for x in flats])
        if held
        else torch.empty(0)
    )


def keep_values(slot: str, held: Sequence[Held], flat: T) -> None:
    """Set the parameters, or one of their slots, from values that lie end to end."""
    for h, values in zip(
        held, flat.split([h.local.numel() for h in held]), strict=True
    ):
        values_of(h, slot).copy_(values.view_as(h.local))


def wider(x: T) -> torch.dtype:
    """Return float32, or the tensor's own type if that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def state_of(state: State, how: Sync, number: int) -> Iterator[tuple[str, Held, str]]:
    """Yield the state that a joining island takes over at the end of a round: message tag, parameter, and slot.

    The slot is "" for the parameter itself. Residuals of compression and the optimizer's moments are not handed over:
    each island has its own.
    """
    for h in state.held:
        if h.local.is_floating_point():
            yield f"state {number}/{h.name}", h, ""
    for h in state.learning:
        for slot in slots_of(how):
            if slot not in ("up", "down"):
                yield f"state {number}/{h.name}/{slot}", h, slot


def send_state(
    state: State,
    how: Sync,
    streams: Streams,
    island: int,
    number: int,
    about: Sequence[int],
) -> None:
    """Send :func:`state_of` and some numbers ``about`` it to the same rank of another island, without waiting."""
    streams.send(island, f"state {number}", torch.tensor(about))
    for tag, h, slot in state_of(state, how, number):
        values = values_of(h, slot)
        # which goes on to change here
        streams.send(island, tag, values.flatten().to("cpu", wider(values), copy=True))


@torch.no_grad()
def take_state(
    state: State, how: Sync, streams: Streams, island: int, number: int
) -> list[int]:
    """Receive :func:`state_of` from the same rank of another island into ``state``; returns the numbers about it.

    It is sent when that island's round ends, however long that takes. Raises :class:`IslandLost`.
    """
    about: list[int] = streams.receive(
        island, f"state {number}", torch.int64, limit=inf
    ).tolist()
    for tag, h, slot in state_of(state, how, number):
        target = values_of(h, slot)
        target.copy_(streams.receive(island, tag, wider(target)).view_as(target))
    return about
