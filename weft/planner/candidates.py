"""Lists all candidate layouts: every way to cut the ranks whose sizes divide, and why the other ways are excluded."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.planner.cost import (
    AWAY,
    FILE,
    IN_PARTS,
    ULYSSES,
    Plan,
    Recompute,
    schedule_number,
)
from weft.planner.machine import Machine
from weft.recipe import PLACES, Memory
from weft.schedule.build import builders
from weft.shapes.shape import Shape

#: Fields of a plan that the search chooses first, in the order in which they are named.
FIRST = (
    "dp", "shard", "zero", "tp", "cp", "context", "pp", "schedule", "virtual", "ep", "micro_batch", "recompute",
)  # fmt: skip
#: What is added to plans that it may help (:func:`variants`).
ADDED = ("secondary", *AWAY, *IN_PARTS)
#: Sequences of a pass that are tried; others only where they are asked for.
ROWS = (1, 2, 4, 8, 16, 32)
#: Tokens of a pass on a rank beyond which no pass is tried that nobody asks for.
LONGEST_PASS = 65536
#: Tiles of a weight that are tried where whole weights do not fit.
TILES = 16
CHOSEN = (*FIRST, *ADDED)
#: What the user sets; the data axes follow from these.
SET = tuple(name for name in CHOSEN if name not in ("dp", "shard"))

Mask = NDArray[np.bool_]


def divisors(n: int, most: float = math.inf) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return [d for d in sorted({*small, *(n // d for d in small)}) if d <= most]


@dataclass(frozen=True)
class Refused:
    """A rule of divisibility that excludes layouts: how many ways to divide the ranks it excludes, and an example.

    A way to divide the ranks gives the sizes of ``tp``, ``pp``, ``cp`` and the data axes. A way that breaks several
    rules is counted for the first of them only. ``rule``: the rule in words. ``count``: number of ways that the rule
    excludes. ``example``: the conflicting values of one such way. ``fix``: what the user can change, in words.
    """

    rule: str
    count: int
    example: str
    fix: str


@dataclass(frozen=True)
class Rules:
    """Rules of divisibility that a layout of ``count`` ranks must meet, for ``batch`` sequences of ``seq`` tokens.

    ``shape``: the model; ``machine``: the devices and links of the cluster. ``rows``: sequences per pass that the user
    asks for; they are tried beside the usual numbers (:data:`ROWS`). A rank whose share of the batch is smaller takes
    its whole share. ``replicas``: whether layouts without ZeRO are tried as well, in which data-parallel ranks keep
    whole copies of the state. By default they are not, as ZeRO is never slower.
    """

    shape: Shape
    machine: Machine
    count: int
    batch: int
    seq: int
    rows: tuple[int, ...] = ()
    replicas: bool = False

    def ways(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield every ``(tp, pp, cp, data)`` whose product is the number of ranks.

        ``data``: ranks that process different sequences, the product of ``dp`` and ``shard``.
        """
        for tp in divisors(self.count):
            for pp in divisors(self.count // tp):
                for cp in divisors(self.count // tp // pp):
                    yield tp, pp, cp, self.count // tp // pp // cp

    def broken(
        self, tp: int, pp: int, cp: int, data: int
    ) -> tuple[str, str, str] | None:
        """Return the first rule that a layout breaks, as three texts: the rule, the conflicting values, and a remedy.

        Returns None if the layout breaks no rule. ``tp``, ``pp``, ``cp``: sizes of these axes. ``data``: ranks that
        process different sequences, the product of ``dp`` and ``shard``.
        """
        heads, kv, layers = (
            int(self.shape.heads),
            int(self.shape.kv_heads),
            int(self.shape.layers),
        )
        domain, batch = int(self.machine.domain), self.batch
        if tp > 2 * domain:
            # Once across the border is allowed: to show its price.
            return (
                "tp leaves the fast domain",
                f"tp={tp}, fast links join {domain}",
                f"tp={domain} or less",
            )
        if heads % tp or max(kv, tp) % min(kv, tp):
            fit = [
                d
                for d in range(1, 2 * domain + 1)
                if not heads % d and not max(kv, d) % min(kv, d)
            ]
            return (
                "tp does not divide the heads",
                f"tp={tp}, {heads} heads of {kv} keys",
                f"tp={_near(fit, tp)}",
            )
        if pp > layers:
            near = _near(divisors(self.count, layers), pp)
            return "more stages than layers", f"pp={pp}, {layers} layers", f"pp={near}"
        if cp > max(1, self.seq // 1024) or self.seq % (cp * tp):
            most = max(1, self.seq // 1024)
            return (
                "cp cuts a sequence too finely",
                f"cp={cp}, {self.seq} tokens",
                f"cp={most} or less",
            )
        if batch % data:
            example = f"{batch} sequences over {data} (tp={tp} pp={pp} cp={cp})"
            most = -(-self.count // math.gcd(batch, self.count))
            mend = f"batch={-(-batch // data) * data}, or tp x pp x cp = {most}"
            return "the batch does not divide over the data ranks", example, mend
        return None

    def refused(self) -> list[Refused]:
        examples: dict[str, list[tuple[str, str]]] = {}
        for way in self.ways():
            if broken := self.broken(*way):
                examples.setdefault(broken[0], []).append(broken[1:])
        return [
            Refused(rule, len(cases), *cases[0]) for rule, cases in examples.items()
        ]

    def candidates(self, bits: int) -> Plan:
        """Return all layouts that break no rule, as one :class:`Plan` of arrays with an entry per layout.

        ``bits``: width of the operands of matrix products. Raises :class:`UsageError` if there is no layout.
        """
        rows = [
            row
            for way in self.ways()
            if not self.broken(*way)
            for row in self._filled(*way)
        ]
        if not rows:
            reasons = "; ".join(
                f"{r.rule} ({r.example}; nearest: {r.fix})" for r in self.refused()
            )
            raise UsageError(
                f"no layout of {self.count} devices is possible: {reasons}"
            )
        columns = dict(zip(FIRST, np.array(rows, dtype=float).T, strict=True))
        columns |= {name: np.zeros(len(rows)) for name in ADDED}
        return Plan(**columns, batch=self.batch, seq=self.seq, bits=bits)

    def _filled(
        self, tp: int, pp: int, cp: int, data: int
    ) -> Iterator[tuple[float, ...]]:
        """Yield the rows of :data:`FIRST`: all further choices for these sizes."""
        share, ranks = self.batch // data, data * cp * tp
        asked = {min(rows, share) for rows in self.rows}
        micro = [
            b
            for b in sorted({*ROWS, *asked})
            if b in asked or (share % b == 0 and b * self.seq // cp <= LONGEST_PASS)
        ] or [1]
        contexts = (
            [0, ULYSSES]
            if cp > 1 and max(1, int(self.shape.kv_heads) // tp) % cp == 0
            else [0]
        )
        inside = max(1, int(self.machine.domain) // (tp * cp))
        whole = [(data, 1, 0)] if data == 1 or self.replicas else []
        sharding = whole + ([(1, data, 1), (1, data, 3)] if data > 1 else [])
        if 1 < inside < data and data % inside == 0:
            sharding.append((data // inside, inside, 3))
        sites = self.count // int(min(self.machine.site, self.count))
        if (
            1 < sites < data
            and data % sites == 0
            and (sites, data // sites, 3) not in sharding
        ):
            sharding.append((sites, data // sites, 3))  # a copy on every site
        experts = [
            e for e in divisors(int(self.shape.experts or 1), ranks) if ranks % e == 0
        ]
        folding = {
            way: [e for e in experts if _folds(e, *way[:2], cp, tp)] for way in sharding
        }
        for b in micro:
            schedules = _schedules(pp, -(-share // b), int(self.shape.layers))
            ways = [(way, ep) for way in sharding for ep in folding[way]]
            for (schedule, virtual), (
                (dp, shard, zero),
                ep,
            ), context, recompute in product(schedules, ways, contexts, range(3)):
                yield (
                    dp,
                    shard,
                    zero,
                    tp,
                    cp,
                    context,
                    pp,
                    schedule,
                    virtual,
                    ep,
                    b,
                    recompute,
                )


def _folds(ep: int, dp: int, shard: int, cp: int, tp: int) -> bool:
    """Return whether experts can be spread over ``ep`` of these ranks."""
    layout = Layout(dp=dp, shard=shard, cp=cp, tp=tp)
    return layout.folds(ep) or (ep % tp == 0 and layout.folds(ep // tp))


def variants(
    plans: Plan,
    machine: Machine,
    fits: Mask,
    cheap: dict[str, Mask],
    wanted: dict[str, int],
    places: Sequence[int],
    tied: bool = True,
) -> Plan:
    """Return ``plans`` together with variants of them.

    There are three kinds of variants: "secondary" (secondary partitions, ZeRO++ hpZ), "away" (state on the host or in
    files) and "overlap" (one half of the tokens computes while the sums of the other half travel over ``tp``). A
    variant is made only where it may help. A secondary partition may help where ZeRO-3 gathers across slow links and
    memory is left. State away from the device may help where device memory is not enough.

    ``machine``: the cluster. ``fits``: which plans fit in memory. ``cheap``: for each kind, which plans are worth a
    variant: those that might become the fastest if the variation cost no time. ``wanted``: values that the user
    demands, by field of :class:`Plan`. Demanded variants are made even where they do not help. ``places``: the places
    to try for state (host, file), as indices into :data:`weft.recipe.PLACES`. ``tied``: whether the output layer is the
    table of embeddings.
    """
    state = plans.state_ranks
    # A pipeline gathers once a step: there is no second gather to keep inside.
    twice = (plans.zero >= 3) & (plans.pp == 1) & (plans.ep == 1)
    if "secondary" not in wanted:
        twice &= (state * plans.tp > machine.domain) & fits & cheap["secondary"]
        near = nearby(state[twice], plans.tp[twice], machine)
    else:
        near = np.full(int(twice.sum()), float(wanted["secondary"]))
    cut = (near > 1) & (near < state[twice]) & (state[twice] % np.maximum(near, 1) == 0)
    candidates = [replace(take(take(plans, twice), cut), secondary=near[cut])]
    asked = any(wanted.get(kind) for kind in (*AWAY, "tiles", "embedding"))
    bases = [plans, *candidates] if asked else [take(plans, cheap["away"] & ~fits)]
    ways = [
        dict(zip(AWAY, way, strict=True))
        for way in product((0, *places), repeat=len(AWAY))
        if any(way)
    ]
    ways = [
        way
        for way in ways
        if all(wanted.get(kind, place) == place for kind, place in way.items())
    ]
    for base, way in product(bases, filter(_can_rest, ways)):
        # Hooks do not see what selective recomputation keeps.
        fitting = (base.recompute != Recompute.SELECTIVE) | (way["activations"] == 0)
        # One stage after the other comes from a file, with all microbatches: a pipeline takes turns.
        chosen = take(base, fitting & ((base.pp == 1) | (way["weights"] != FILE)))
        candidates.append(
            replace(
                chosen,
                **{kind: np.full(len(chosen.tp), float(way[kind])) for kind in AWAY},
            )
        )
        # alone, a device can fetch its parameters block by block too
        if way["weights"]:
            alone = take(
                candidates[-1], (chosen.zero == 0) & (chosen.cp == 1) & (chosen.pp == 1)
            )
            candidates.append(replace(alone, zero=alone.zero + 3))
        if way["weights"]:
            for each in candidates[-2:]:
                candidates += in_parts(each, wanted, tied)
    if overlap := wanted.get("overlap"):
        woven = [take(each, _weaves(each)) for each in (plans, *candidates)]
        candidates += [
            replace(each, overlap=np.full(len(each.tp), float(overlap)))
            for each in woven
        ]
    elif "overlap" not in wanted:
        worth = take(plans, _weaves(plans) & fits & cheap["overlap"])
        candidates.append(replace(worth, overlap=np.ones(len(worth.tp))))
    return join_splits(candidates)


def _weaves(plans: Plan) -> Mask:
    """Return which plans can compute one half of a microbatch's tokens while sums of the other travel over ``tp``."""
    whole = (plans.secondary == 0) & (plans.tiles == 0) & (plans.embedding == 0)
    return np.asarray((plans.tp > 1) & (plans.cp == 1) & whole)


def in_parts(plans: Plan, wanted: dict[str, int], tied: bool) -> list[Plan]:
    """Return variants of ``plans`` that bring weights to the device in parts instead of whole.

    The weights of all ``plans`` rest on the host or in files. There are up to three variants: rows of the embedding
    table, tiles of the projections' weights, or both. Plans with a pipeline, with selective recomputation or with a
    secondary partition are left out, because they cannot be combined with parts. ``wanted``: values that the user
    demands, by field. ``tied``: whether the output layer is the embedding table, which is then never cut into rows.
    """
    fitting = (plans.recompute != Recompute.SELECTIVE) & (plans.secondary == 0)
    chosen = take(plans, fitting & (plans.pp == 1))
    ones = np.ones(len(chosen.tp))
    tiles, rows = wanted.get("tiles", TILES), wanted.get("embedding", 1) * (not tied)
    ways = dict.fromkeys(((0, rows), (tiles, 0), (tiles, rows)))
    return [
        replace(chosen, tiles=ones * t, embedding=ones * r) for t, r in ways if t or r
    ]


def take(plans: Plan, which: Any) -> Plan:
    """Return the layouts that ``which``, a mask or indices, selects from ``plans``, a plan whose fields are arrays.

    ``outer`` (which axis crosses between sites) becomes 0 in all of them, because the search chooses it last.
    """
    return replace(
        plans, outer=0, **{name: getattr(plans, name)[which] for name in CHOSEN}
    )


def join_splits(parts: Sequence[Plan]) -> Plan:
    """Join the plans ``parts``, whose fields are arrays with an entry per layout, to one plan with the layouts of all.

    ``outer`` (which axis crosses between sites) becomes 0, because the search chooses it last.
    """
    return replace(
        parts[0],
        outer=0,
        **{name: np.concatenate([getattr(p, name) for p in parts]) for name in CHOSEN},
    )


def _can_rest(way: dict[str, int]) -> bool:
    """Return whether a recipe can express these places."""
    try:
        Memory.model_validate({kind: PLACES[place] for kind, place in way.items()})
    except ValueError:
        return False
    return True


def nearby(
    state: NDArray[np.float64], tp: NDArray[np.float64], machine: Machine
) -> NDArray[np.float64]:
    """Return for each plan the size of the largest secondary partition (ZeRO++ hpZ) that has fast links only.

    A secondary partition is a group of ranks that together keep one copy of all parameters. Its size divides ``state``,
    the number of ranks over which ZeRO cuts the state. ``tp``: size of the tensor-parallel axis. Ranks of a partition
    have numbers that are ``tp`` apart. Of the ``machine.domain`` devices that fast links join, a partition can
    therefore use one in ``tp``. ``state``, ``tp`` and the result have one entry per plan.
    """
    pairs = {
        (s, t): max(divisors(int(s), machine.domain // t), default=1)
        for s, t in set(zip(state, tp, strict=True))
    }
    return np.array([pairs[pair] for pair in zip(state, tp, strict=True)], dtype=float)


def _near(values: Sequence[int], wanted: int) -> int:
    return min(values, key=lambda v: abs(v - wanted), default=1)


def _schedules(pp: int, microbatches: int, layers: int) -> list[tuple[int, int]]:
    """Return the ``(schedule, virtual)`` pairs to consider for a pipeline of ``pp`` ranks."""
    if microbatches < pp or pp == 1:
        return [(schedule_number("1f1b"), 1)]
    return [
        (number, chunks)
        for number, builder in enumerate(builders().values())
        for chunks in builder.offers(pp, microbatches, layers)
    ]
