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
    from weft.sync.sync_method import SyncMethod

T = torch.Tensor


def slots_of(how: Sync) -> tuple[str, ...]:
    """Return the names of the slots (tensors kept for each parameter) that islands need.

    The slots of the synchronisation method come first. If results of exchanges are applied later, the slot ``answer``
    follows, which keeps such a result until then. With a biased compressor there are residuals of error feedback:
    ``up`` for the messages that islands send, ``down`` for the means that they get back. ``how``: the recipe's section
    ``[sync]``.
    """
    method, (there, back) = how.method, compressors(how)
    names = [*method.slots, *(["answer"] if method.late or how.delay else [])]
    if how.compress != "none":
        names += ["up"] * (not there.unbiased) + ["down"] * (
            not back.unbiased and not there.in_rings
        )
    return tuple(names)


def compressors(how: Sync) -> tuple[Compressor, Compressor]:
    """Return two compressors: that of the messages that islands send, and that of the means that islands get back.

    ``how``: the recipe's section ``[sync]``.
    """
    return build_compressor(how.compress), build_compressor(
        how.compress_back or how.compress
    )


def add_slots(state: State, how: Sync) -> None:
    """Add the slots that islands need (:func:`slots_of`) to every trained parameter.

    A slot is a tensor kept for each parameter, in float32 or the parameter's type if wider. The method gives its
    initial value: most methods start the slot ``anchor`` as a copy of the parameter, all others as zeros. Nothing is
    added if islands exchange gradients in place of parameters. ``how``: the recipe's section ``[sync]``.
    """
    if how.of_gradients:
        return
    method: SyncMethod = how.method
    for h in state.learning:
        here = h.local.detach().to("cpu", wider(h.local), copy=True)
        for name in slots_of(how):
            h.slots[name] = h.part(method.initial(name, here))


def values_of(h: Held, slot: str) -> T:
    """Return this rank's shard of the parameter ``h``, or, unless ``slot`` is "", of the parameter's slot ``slot``."""
    return h.slots[slot].values if slot else h.local.detach()


def flat_values(held: Sequence[Held], slot: str = "") -> T:
    """Return the shards of the parameters ``held`` as one flat tensor: a copy on the host, in float32 or wider.

    If ``slot`` is not empty, the tensor holds the parameters' slots of that name instead.
    """
    flats = [values_of(h, slot) for h in held]
    return (
        torch.cat([x.flatten().to("cpu", wider(x)) for x in flats])
        if held
        else torch.empty(0)
    )


def keep_values(slot: str, held: Sequence[Held], flat: T) -> None:
    """Set the slot named ``slot`` of the parameters ``held`` from ``flat``, their concatenated values.

    If ``slot`` is empty, the parameters themselves are set.
    """
    for h, values in zip(
        held, flat.split([h.local.numel() for h in held]), strict=True
    ):
        values_of(h, slot).copy_(values.view_as(h.local))


def wider(x: T) -> torch.dtype:
    """Return the wider of float32 and the data type of ``x``, in which slots of ``x`` are kept."""
    return torch.promote_types(x.dtype, torch.float32)


def state_of(state: State, how: Sync, number: int) -> Iterator[tuple[str, Held, str]]:
    """Yield the tensors that a joining island receives at the end of the round with index ``number``.

    Each item is a message tag, a parameter, and the name of the parameter's slot to send, or "" for the parameter
    itself. Compression residuals and the optimizer's moments are not sent, because each island has its own. ``how``:
    the recipe's section ``[sync]``.
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
    """Send the state that a joining island needs, and return without waiting until it arrives.

    This rank sends to the rank of ``island`` that has the same place there. The tensors are those of :func:`state_of`.
    ``how``: the recipe's section ``[sync]``. ``streams``: the connections to other islands. ``number``: index of the
    round that has ended. ``about``: integers to send with the state, such as counts of tokens.
    """
    streams.send(island, f"state {number}", torch.tensor(about))
    for tag, h, slot in state_of(state, how, number):
        values = values_of(h, slot)
        # which goes on to change here
        streams.send(island, tag, values.flatten().to("cpu", wider(values), copy=True))


@torch.no_grad()
def take_state(
    state: State, how: Sync, streams: Streams, island: int, number: int
) -> list[int]:
    """Receive into ``state`` what another island sends by :func:`send_state`, and return the integers sent with it.

    The sender is the rank of ``island`` that has the same place there as this rank here. This function waits without
    limit until the sender has ended the round with index ``number``. ``how``: the recipe's section ``[sync]``.
    ``streams``: the connections to other islands. Raises :class:`IslandLost` if the sender is lost.
    """
    about: list[int] = streams.receive(
        island, f"state {number}", torch.int64, limit=inf
    ).tolist()
    for tag, h, slot in state_of(state, how, number):
        target = values_of(h, slot)
        target.copy_(streams.receive(island, tag, wider(target)).view_as(target))
    return about
