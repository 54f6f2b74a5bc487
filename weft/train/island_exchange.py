"""One exchange of a fragment of the parameters between islands: plain or compressed, over a ring or with neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.layout.mesh import from_all
from weft.sync.collectives import compressed_mean, from_islands, power_mean, ring_sum
from weft.sync.compress import PerTensor
from weft.sync.compressor import Compressor
from weft.sync.greco import allocate_compressors, alternatives_of
from weft.sync.parity import take_majority
from weft.sync.replicas import Replicas, replicas_of
from weft.sync.rounds import fragment_of, partners, shares
from weft.train.island_state import compressors, flat_values

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.parallel.state import Held, State
    from weft.recipe import Sync
    from weft.sync.presence import Presence

T = torch.Tensor


class Exchanged(NamedTuple):
    """Result of one exchange of a fragment (a subset of the parameters) between islands.

    Attributes:
        ``answer``: mean of the flat tensors that the islands sent.
        ``islands``: number of islands over which the mean was taken.
        ``kept``: new values of the slots that the exchange changed, by slot name. A slot is a tensor kept for each
            parameter, such as a residual. The values are flattened and concatenated over the fragment's parameters.
        ``warm``: for each parameter name, the factor from which the compressor PowerSGD starts in the next exchange.
    """

    answer: T
    islands: int
    kept: Mapping[str, T] = {}
    warm: Mapping[str, T] = {}


class IslandExchange:
    """Exchanges fragments (subsets of the parameters) between this rank and the same rank of other islands.

    :meth:`run` changes no state, so a background thread may call it. ``presence``: which islands take part. ``how``:
    the recipe's section ``[sync]``. ``fragments``: the parameters of each fragment.
    """

    def __init__(self, state: State, mesh: Mesh, presence: Presence, how: Sync) -> None:
        self.mesh, self.presence, self.how = mesh, presence, how
        self.streams = presence.streams
        self.there, self.back = compressors(how)
        #: By parameter: the factor of PowerSGD from the last round.
        self.warm: dict[str, T] = {}
        #: By parameter: the compressor that L-GreCo has chosen, if this island is the one that chooses.
        self.allocated: dict[str, Compressor] = {}
        count = how.fragments
        self.fragments = [
            [h for h in state.learning if fragment_of(h.name, count) == f]
            for f in range(count)
        ]
        #: The replicas of this island that each exchange a part of a fragment; PowerSGD's matrices are not cut so.
        self.replicas = [
            Replicas() if self.there.in_rings else replicas_of(held, mesh)
            for held in self.fragments
        ]

    def whole(self, f: int, result: Exchanged, sent: int) -> Exchanged:
        """Gather the whole result of an exchange from the replicas of this island, each of which exchanged a part.

        ``f``: index of the fragment. ``result``: the result for this rank's part. ``sent``: number of elements in the
        parts of all replicas together.
        """
        replicas, held = self.replicas[f], self.fragments[f]
        if replicas.group is None:
            return result
        size = sum(h.local.numel() for h in held)
        here, kept = replicas.part(size), dict[str, T]()
        for name in sorted(
            {
                name
                for names in from_all([*result.kept], replicas.group)
                for name in names
            }
        ):
            values = (
                result.kept[name]
                if name in result.kept
                else flat_values(held, name)[here]
            )
            kept[name] = replicas.whole(values, size)
        return result._replace(answer=replicas.whole(result.answer, sent), kept=kept)

    def run(
        self, f: int, number: int, values: T, shared: Mapping[str, T], step: int
    ) -> Exchanged:
        """Exchange this rank's part of ``values``, and return its mean over the partner islands.

        A background thread may call this method. ``f``: index of the fragment. ``number``: index of the exchange, from
        the beginning of the run. ``values``: the fragment's elements, flat. ``step``: the number of steps so far.

        ``shared``: slots (tensors kept for each parameter) that must be equal on all islands, flat by name. The slot
        ``anchor`` holds the parameters at the beginning of the round. If this island's slots differ from those of most
        islands, the result holds the slots of those islands. Their anchor minus this island's anchor is then also added
        to what this island sends.
        """
        held, here = self.fragments[f], self.replicas[f].part(values.numel())
        shared = {name: values[here] for name, values in shared.items()}

        def draw(among: Sequence[int]) -> Sequence[int]:
            return partners(self.mesh.island, among, self.how, number)

        def work(members: Sequence[int], tag: str) -> Exchanged:
            if not held:
                return Exchanged(values, len(members))
            sent, kept = values[here].clone(), dict[str, T]()
            if shared:
                right, odd = take_majority(self.streams, shared, members, tag)
                if odd:
                    self.presence.note_differing(odd, step)
                if self.mesh.island in odd:
                    kept |= right
                    sent += right["anchor"] - shared["anchor"]
            if self.how.compress != "none":
                result = self.compressed(
                    held, sent, here, tag, step // self.how.every, members
                )
                return result._replace(kept={**result.kept, **kept})
            if self.how.partner in ("ring", "graph"):
                came = from_islands(self.streams, sent, members, tag)
                parts = shares(self.mesh.island, members, self.how)
                answer = sum(
                    (share * x for share, x in zip(parts, came, strict=True)),
                    torch.zeros_like(sent),
                )
            else:
                answer = ring_sum(
                    self.streams, sent, self.streams.ring(members), tag
                ).div_(len(members))
            return Exchanged(answer, len(members), kept)

        return self.presence.exchange(number, draw, work)

    def compressed(
        self,
        held: Sequence[Held],
        values: T,
        here: slice,
        tag: str,
        number: int,
        members: Sequence[int],
    ) -> Exchanged:
        """Return the mean of ``values`` over the islands ``members``, computed with compressed messages.

        The result's ``kept`` holds the compression errors (residuals). ``held``: the fragment's parameters. ``values``:
        this rank's elements of these parameters, flat. ``here``: where ``values`` lies in the fragment, as a slice of
        its concatenated parameters. ``tag``: prefix of the messages' tags. ``number``: index of the round.
        """
        left: dict[str, T] = {
            name: flat_values(held, name)[here]
            for name in ("up", "down")
            if name in held[0].slots
        }
        if not self.there.in_rings:
            there, back = self.there, self.back
            if self.how.allocate:
                wanted = values + left["up"] if "up" in left else values
                there = self.per_tensor(held, wanted, here, tag, number, members)
                back = back if self.how.compress_back else there
            answer = compressed_mean(
                self.streams,
                values,
                there,
                back,
                tag,
                number,
                left.get("up"),
                left.get("down"),
                members,
            )
            return Exchanged(answer, len(members), left)
        answer, kept, sizes = (
            torch.empty_like(values),
            dict[str, T](),
            [h.local.numel() for h in held],
        )
        flats = (values, left["up"], answer)
        parts = [
            [
                f.view(h.local.shape)
                for h, f in zip(held, flat.split(sizes), strict=True)
            ]
            for flat in flats
        ]
        messages = {h.name: x + up for h, x, up, _ in zip(held, *parts, strict=True)}
        chosen = self.allocation(messages, tag, number, members)
        ring = self.streams.ring(members)
        for h, x, up, out in zip(held, *parts, strict=True):
            there, warm = chosen[h.name], self.warm.get(h.name)
            payload = power_mean(
                self.streams, x, there, f"{tag}/{h.name}", number, up, warm, ring
            )
            if (warm := there.warm(payload)) is not None:
                kept[h.name] = warm
            out.copy_(there.decode(payload, x.shape, number))
        return Exchanged(answer, len(members), left, kept)

    def allocation(
        self, wanted: Mapping[str, T], tag: str, number: int, members: Sequence[int]
    ) -> Mapping[str, Compressor]:
        """Return the compressor of each tensor of ``wanted``, by parameter name.

        ``wanted``: the messages by parameter name. ``number``: index of the round. ``tag``: prefix of the messages'
        names. ``members``: the islands that take part.

        All tensors have the same compressor, unless ``how.allocate`` is set. The algorithm L-GreCo then chooses a
        compressor for each tensor, anew every ``how.allocate`` rounds, on the first island of ``members``. That island
        sends its choice in each round, because an island may have missed the round before.
        """
        if not self.how.allocate or len(members) == 1:
            return dict.fromkeys(wanted, self.there)
        options = {
            name: alternatives_of(self.there, x.shape) for name, x in wanted.items()
        }
        if self.mesh.island != members[0]:
            indices = self.streams.receive(
                members[0], f"{tag}/allocation", torch.int32
            ).tolist()
            return {
                name: options[name][i] for name, i in zip(wanted, indices, strict=True)
            }
        if (
            number % self.how.allocate == 0
            or not wanted.keys() <= self.allocated.keys()
        ):
            self.allocated |= allocate_compressors(wanted, self.there, number)
        indices = [options[name].index(self.allocated[name]) for name in wanted]
        for other in members[1:]:
            self.streams.send(
                other, f"{tag}/allocation", torch.tensor(indices, dtype=torch.int32)
            )
        self.streams.flush()
        return {name: self.allocated[name] for name in wanted}

    def per_tensor(
        self,
        held: Sequence[Held],
        wanted: T,
        here: slice,
        tag: str,
        number: int,
        members: Sequence[int],
    ) -> PerTensor:
        """Return a compressor that compresses each parameter's elements in this rank's message separately.

        ``held``: the fragment's parameters. ``wanted``: the message, flat. ``here``: where the message lies in the
        fragment, as a slice of its concatenated parameters. ``tag``: prefix of the messages' tags. ``number``: index of
        the round. ``members``: the islands that take part, the first of which chooses the compressors.
        """
        parts: dict[str, T] = {}
        start = 0
        for h in held:
            first, last = (
                min(max(at, here.start), here.stop)
                for at in (start, start + h.local.numel())
            )
            if first < last:
                parts[h.name] = wanted[first - here.start : last - here.start]
            start += h.local.numel()
        chosen = self.allocation(parts, tag, number, members)
        pieces = tuple((x.numel(), chosen[name]) for name, x in parts.items())
        return PerTensor(self.there.unbiased, pieces)
