"""Islands that take steps by themselves, and exchange parameters between some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.layout.mesh import from_all
from weft.sync.collectives import compressed_mean, from_islands, power_mean, ring_sum
from weft.sync.compress import PerTensor, build_compressor
from weft.sync.compressor import Compressor
from weft.sync.greco import allocate_compressors, alternatives_of
from weft.sync.measure import measured_ring
from weft.sync.parity import take_majority
from weft.sync.replicas import Replicas, replicas_of
from weft.sync.rounds import begins, fragment_of, partners, shares
from weft.train.step import PhaseFiller

if TYPE_CHECKING:
    from weft.parallel.state import Held, State
    from weft.recipe import Sync
    from weft.sync.presence import Presence
    from weft.sync.streams import Streams
    from weft.sync.sync_method import SyncMethod
    from weft.train.step import StepContext
    from weft.train.step_values import StepResult

T = torch.Tensor


def slots_of(how: Sync) -> tuple[str, ...]:
    """The names of the slots that every parameter has for the sake of the islands.

    They are the method's own; ``answer``, the result of an exchange that is not applied yet; and with compression what
    the messages left out (error feedback): of those that were sent ``up``, and of the means sent back ``down``.
    """
    method, (there, back) = how.method, compressors(how)
    found = [*method.slots, *(["answer"] if method.late or how.delay else [])]
    if how.compress != "none":
        found += ["up"] * (not there.unbiased) + ["down"] * (
            not back.unbiased and not there.in_rings
        )
    return tuple(found)


def compressors(how: Sync) -> tuple[Compressor, Compressor]:
    """The compressor of what is sent, and that of what comes back."""
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


def put_in_ring(streams: Streams, state: State, how: Sync) -> str:
    """Measure the links and put the islands into the fastest ring, if sums go around one; returns a line to report."""
    if (
        streams.islands < 3
        or not how.in_ring
        or how.order == "numbered"
        or streams.shared is None
    ):
        # two islands make only one ring, and an island that comes later is told the ring's order
        return ""
    elements = sum(h.local.numel() for h in state.learning)
    return measured_ring(streams, 4.0 * elements / how.fragments)


class Exchanged(NamedTuple):
    """The result of one exchange of a fragment: ``answer``, the mean of what ``islands`` islands have sent.

    ``kept``: new values of slots, by slot, those of all parameters of the fragment end to end. ``warm``: by parameter,
    the factor with which PowerSGD begins the next exchange.
    """

    answer: T
    islands: int
    kept: Mapping[str, T] = {}
    warm: Mapping[str, T] = {}


class Apart(PhaseFiller):
    """Islands take steps by themselves, and agree every ``how.every`` steps.

    A *round* is what happens every so many steps; in it, each *fragment* of the parameters is exchanged once with the
    partners. ``presence`` says which islands take part; ``steps`` counts the steps so far. A wish to end the run is
    passed on in the next round and ends it with the one after, so that all islands end after the same step.
    """

    def __init__(self, context: StepContext, presence: Presence, how: Sync) -> None:
        self.context, self.presence, self.how = context, presence, how
        self.state, self.mesh = context.state, context.mesh
        self.steps, self.stops = context.begun, False
        self.method: SyncMethod = how.method
        count = how.fragments
        self.streams = self.presence.streams
        self.there, self.back = compressors(self.how)
        #: By parameter: the factor of PowerSGD from the last round.
        self.warm: dict[str, T] = {}
        #: By parameter: the compressor that L-GreCo has chosen, if this island is the one that chooses.
        self.allocated: dict[str, Compressor] = {}
        self.fragments = [
            [h for h in self.state.learning if fragment_of(h.name, count) == f]
            for f in range(count)
        ]
        #: The replicas of this island that each exchange a part of a fragment; PowerSGD's matrices are not cut so.
        alone = self.there.in_rings
        self.replicas = [
            Replicas() if alone else replicas_of(held, self.mesh)
            for held in self.fragments
        ]
        #: Exchanges under way, by fragment. One after the other, in the same order on all islands.
        self.under_way: dict[int, Future[Exchanged]] = {}
        #: By fragment: how many islands the answer in its slots is the mean of; all, if it is not in here.
        self.counts: dict[int, int] = dict(enumerate(self.presence.counts))
        self.exchanging = ThreadPoolExecutor(1, "weft-islands")

    def after(
        self, results: list[StepResult], finish: Callable[[], list[StepResult]]
    ) -> list[StepResult]:
        self.steps += 1
        due = [f for f in range(len(self.fragments)) if self.is_due(f)]
        if due:
            results += finish()
        results = self.without_stop(results)
        if due:
            number = self.steps // self.how.every  # of the round
            if self.stops:
                self.presence.request_stop(number + 1)
            self.context.before_update()
            self.state.expose()
            for f in due:
                self.agree(f)
            self.state.release()  # what was gathered is of other values
            if begins(self.steps, 0, self.how):
                for island in self.presence.newcomers(self.number(0)):
                    self.hand_over(island, sum(result.tokens for result in results))
                ends = self.presence.stop_round()
                if results and ends is not None and ends <= number:
                    results[-1] = results[-1]._replace(stop=True)
        return results

    def end(self, results: list[StepResult]) -> list[StepResult]:
        """Wait for exchanges under way, whose answers become slots of the state."""
        results = self.without_stop(results)
        self.keep_answers()
        return results

    def keep_answers(self) -> None:
        """Wait for the exchanges under way, and keep their answers in slots."""
        if self.under_way:
            self.context.before_update()
        for f in list(self.under_way):
            answer, self.counts[f] = self.answer(f)
            self.keep("answer", self.fragments[f], answer)

    def summary(self) -> str:
        sent = (self.streams.sent + self.streams.around) / 2**20
        times = self.steps // self.how.every
        return f"islands agreed {times} time{'s' * (times != 1)}; this rank has sent {sent:.3g} MiB to others"

    def news(self) -> list[str]:
        return self.presence.take_news()

    def without_stop(self, results: list[StepResult]) -> list[StepResult]:
        """Note whether a rank of this island wishes to end the run, which no step by itself does."""
        self.stops = self.stops or any(result.stop for result in results)
        return [result._replace(stop=False) for result in results]

    def is_due(self, f: int) -> bool:
        """Whether an exchange of fragment ``f`` begins after this step, or the answer to one is applied."""
        return begins(self.steps, f, self.how) or begins(
            self.steps - self.how.delay, f, self.how
        )

    def number(self, f: int) -> int:
        """The number of a fragment's exchange that begins after this step."""
        return self.steps // self.how.every * self.how.fragments + f

    @torch.no_grad()
    def agree(self, f: int) -> None:
        """Begin a round of a fragment, or apply the answer to the last one, or both."""
        held, delay = self.fragments[f], self.how.delay
        starts, later, answer = (
            begins(self.steps, f, self.how),
            bool(delay) or self.method.late,
            None,
        )
        if starts:
            self.presence.begin(self.number(f))
        if later and (self.method.late or begins(self.steps - delay, f, self.how)):
            answer = self.answer(f)
        theta, slots = (
            self.flat(held),
            {name: self.flat(held, name) for name in self.method.slots},
        )
        mine = self.method.sent(theta, slots) if starts else theta
        shared = {name: slots[name] for name in self.method.shared}
        if starts and not later:
            found = self.whole(
                f,
                self.exchanged(f, self.number(f), mine, shared, self.steps),
                mine.numel(),
            )
            answer = self.keep_exchanged(f, found)
            slots |= {name: found.kept[name] for name in shared if name in found.kept}
        if answer is not None:
            theta = self.method.applied(theta, slots, *answer)
            for name, values in slots.items():
                self.keep(name, held, values)
            self.keep("", held, theta)
        if starts and later:
            self.under_way[f] = self.exchanging.submit(
                self.exchanged, f, self.number(f), mine, shared, self.steps
            )

    def answer(self, f: int) -> tuple[T, int]:
        """The answer of a fragment's last exchange, and how many islands it is of."""
        if f in self.under_way:
            found = self.under_way.pop(f).result()
            return self.keep_exchanged(
                f, self.whole(f, found, sum(h.local.numel() for h in self.fragments[f]))
            )
        return self.flat(self.fragments[f], "answer"), self.counts.get(
            f, self.mesh.islands
        )

    def whole(self, f: int, found: Exchanged, sent: int) -> Exchanged:
        """The result of an exchange, with the parts that the other replicas of this island have exchanged.

        ``sent``: elements of all parts together.
        """
        replicas, held = self.replicas[f], self.fragments[f]
        if replicas.group is None:
            return found
        size = sum(h.local.numel() for h in held)
        here, kept = replicas.part(size), dict[str, T]()
        for name in sorted(
            {
                name
                for names in from_all([*found.kept], replicas.group)
                for name in names
            }
        ):
            mine = (
                found.kept[name] if name in found.kept else self.flat(held, name)[here]
            )
            kept[name] = replicas.whole(mine, size)
        return found._replace(answer=replicas.whole(found.answer, sent), kept=kept)

    def keep_exchanged(self, f: int, found: Exchanged) -> tuple[T, int]:
        """Keep what an exchange has changed in slots; returns its answer, and how many islands that is of."""
        for name, values in found.kept.items():
            self.keep(name, self.fragments[f], values)
        self.warm |= found.warm
        return found.answer, found.islands

    def exchanged(
        self, f: int, number: int, mine: T, shared: Mapping[str, T], step: int
    ) -> Exchanged:
        """Exchange this rank's part of ``mine`` for the mean over the partners. Runs in a thread, and changes no state.

        ``shared``: slots that must be equal on all islands. An island where they differ gets the others' values, and
        sends what it would have sent with these.
        """
        held, here = self.fragments[f], self.replicas[f].part(mine.numel())
        shared = {name: values[here] for name, values in shared.items()}

        def draw(among: Sequence[int]) -> Sequence[int]:
            return partners(self.mesh.island, among, self.how, number)

        def work(members: Sequence[int], tag: str) -> Exchanged:
            if not held:
                return Exchanged(mine, len(members))
            sent, kept = mine[here].clone(), dict[str, T]()
            if shared:
                right, odd = take_majority(self.streams, shared, members, tag)
                if odd:
                    self.presence.note_differing(odd, step)
                if self.mesh.island in odd:
                    kept |= right
                    sent += right["anchor"] - shared["anchor"]
            if self.how.compress != "none":
                found = self.compressed(
                    held, sent, here, tag, step // self.how.every, members
                )
                return found._replace(kept={**found.kept, **kept})
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
        mine: T,
        here: slice,
        tag: str,
        number: int,
        members: Sequence[int],
    ) -> Exchanged:
        """The mean over these islands by compressed messages; what these leave out is in the result's ``kept``."""
        left: dict[str, T] = {
            name: self.flat(held, name)[here]
            for name in ("up", "down")
            if name in held[0].slots
        }
        if not self.there.in_rings:
            there, back = self.there, self.back
            if self.how.allocate:
                wanted = mine + left["up"] if "up" in left else mine
                there = self.per_tensor(held, wanted, here, tag, number, members)
                back = back if self.how.compress_back else there
            answer = compressed_mean(
                self.streams,
                mine,
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
            torch.empty_like(mine),
            dict[str, T](),
            [h.local.numel() for h in held],
        )
        flats = (mine, left["up"], answer)
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
        """The compressor of each tensor, of which ``wanted`` is the message: one for all, or those that L-GreCo chose.

        The first member chooses, anew every ``how.allocate`` rounds. It sends its choice in each round, so that members
        need not have taken part in the one before.
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
        """The compressors of what of each parameter is in this rank's part ``here``, whose message is ``wanted``."""
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

    def hand_over(self, island: int, tokens: int) -> None:
        """Send an island that joins, or comes back, the state that it goes on from."""
        self.keep_answers()
        counts = [
            self.counts.get(f, self.mesh.islands) for f in range(self.how.fragments)
        ]
        about = [self.presence.tokens + tokens, *counts, *self.streams.order]
        send_state(
            self.state,
            self.how,
            self.streams,
            island,
            self.steps // self.how.every,
            about,
        )

    def flat(self, held: Sequence[Held], slot: str = "") -> T:
        """The parameters, or one of their slots, end to end: a copy on the host."""
        flats = [values_of(h, slot) for h in held]
        return (
            torch.cat([x.flatten().to("cpu", wider(x)) for x in flats])
            if held
            else torch.empty(0)
        )

    def keep(self, slot: str, held: Sequence[Held], flat: T) -> None:
        for h, values in zip(
            held, flat.split([h.local.numel() for h in held]), strict=True
        ):
            values_of(h, slot).copy_(values.view_as(h.local))


def values_of(h: Held, slot: str) -> T:
    """One of a parameter's slots, or with "" the parameter, as they are here."""
    return h.slots[slot].values if slot else h.local.detach()


def wider(x: T) -> torch.dtype:
    """Float32, or the tensor's own type if that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def state_of(state: State, how: Sync, number: int) -> Iterator[tuple[str, Held, str]]:
    """What an island that joins takes over from another at the end of a round: message tag, parameter, and slot.

    The slot is "" for the parameter itself. What messages left out and the optimizer's moments are not handed over:
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
