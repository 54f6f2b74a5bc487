"""Time of one training step for a shape, a machine and a plan: a roofline in closed form.

Every argument may hold arrays (one entry per candidate or row), so one code path serves one layout and a million.
Sources: Narayanan et al. 2021 (2104.04473; pipeline, tensor parallelism), Korthikanti et al. 2022 (2205.05198;
sequence parallelism, recomputation), Rajbhandari et al. 2020 (ZeRO), Qi et al. 2023 (2401.10241; zero bubble),
Thakur et al. 2005 (collectives).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from weft.planner.attention_io import fused_bytes, query_block
from weft.planner.engine_constants import EngineConstants
from weft.planner.machine import Machine
from weft.recipe import PLACES
from weft.registry import names
from weft.schedule.build import Times, builder_of, builders
from weft.schedule.builder import ScheduleBuilder
from weft.shapes.shape import Num, Shape


class Recompute(IntEnum):
    """The part of a layer's forward that backward computes again.

    ``NONE``: nothing; ``SELECTIVE``: parts that are cheap to compute for the memory they save; ``FULL``: the whole
    layer.
    """

    NONE = 0
    SELECTIVE = 1
    FULL = 2


RECOMPUTE = tuple(kind.name.lower() for kind in Recompute)
CONTEXT = ("zigzag", "ulysses", "gather")
ULYSSES = CONTEXT.index("ulysses")
#: What can rest away from the device, and where, by index into :data:`weft.recipe.PLACES`.
AWAY = ("weights", "moments", "activations")
#: What Weft can do in parts beside that, 0 where it does not: tiles of a weight, rows of the embedding, and tokens of
#: which one half computes while the sums of the other travel over tp.
IN_PARTS = ("tiles", "embedding", "overlap")
EMBEDDING, OVERLAP = ("whole", "rows"), ("none", "domino")
HOST, FILE = (PLACES.index(place) for place in ("host", "file"))
#: Bits of the products in a precision of a recipe.
BITS = {"float64": 32, "float32": 32, "bfloat16": 16}
#: Seconds of one launch.
LAUNCH = 20e-6
#: Keys at which fused attention reaches half of its speed, and the head's width that takes as long as exponentials.
#: From kernels that Dao 2023 (2307.08691, figures 4 and 7) measured on A100 and H100, 512 to 16,384 tokens.
HALF_SPEED, EXPONENTIALS = 520, 20
#: Exponent of the smooth maximum of device time and launch time.
SHARP = 8
#: Memory-bound work that products of 8 or 4 bits add, as a share: everything is read once more to scale and to cast.
CASTS = 0.3


@dataclass(frozen=True)
class Plan:
    """Distribution of a step over ``dp * shard * cp * pp * tp`` ranks. Each field is a number or an array of numbers.

    Attributes:
        ``dp``, ``shard``, ``cp``, ``pp``, ``tp``: number of ranks along each axis of the layout.
        ``ep``: number of ranks over which experts are spread. They are ranks of the other axes, not further ones.
        ``zero``: ZeRO stage, 0 to 3.
        ``secondary``: number of ranks over which ZeRO-3 cuts the parameters that it keeps between forward and backward
            (ZeRO++ hpZ); 0: all ranks over which the state is cut.
        ``context``: scheme of attention along ``cp``, an index into :data:`CONTEXT`.
        ``schedule``: pipeline schedule, an index into :func:`schedules`; ``virtual``: stages per pipeline rank.
        ``batch``: number of sequences of a step over all ranks.
        ``micro_batch``: number of sequences of one pass of a rank.
        ``seq``: tokens of a sequence.
        ``recompute``: a value of :class:`Recompute`.
        ``bits``: width of the operands of matrix products.
        ``weights``, ``moments``, ``activations``: where each rests, an index into :data:`weft.recipe.PLACES`.
        ``tiles``: number of tiles into which the weight of each projection is cut on its way to the device; 0: it is
            brought whole.
        ``embedding``: whether the whole embedding table is brought to the device, or only the rows of tokens in use: an
            index into :data:`EMBEDDING`.
        ``overlap``: what computes while sums travel over ``tp``, an index into :data:`OVERLAP`.
        ``outer``: which ranks are placed furthest apart in the network: 1 for the copies along ``dp``, 0 for the stages
            of a pipeline.
    """

    dp: Num = 1
    shard: Num = 1
    zero: Num = 1
    tp: Num = 1
    cp: Num = 1
    context: Num = 0
    pp: Num = 1
    virtual: Num = 1
    schedule: Num = 0
    ep: Num = 1
    micro_batch: Num = 1
    batch: Num = 1
    seq: Num = 2048
    recompute: Num = 0
    bits: Num = 16
    secondary: Num = 0
    weights: Num = 0
    moments: Num = 0
    activations: Num = 0
    tiles: Num = 0
    embedding: Num = 0
    overlap: Num = 0
    outer: Num = 0

    @property
    def state_ranks(self) -> Num:
        """Number of ranks over which ZeRO cuts the state."""
        return np.where(self.shard > 1, self.shard * self.cp, self.data * self.cp)

    @property
    def data(self) -> Num:
        return self.dp * self.shard

    @property
    def world(self) -> Num:
        return self.data * self.cp * self.pp * self.tp

    @property
    def moves(self) -> Num:
        """Whether any state or activations rest on the host or in files.

        Weights need no test of their own, because moments rest off the device wherever weights do.
        """
        return (self.moments > 0) | (self.activations > 0)

    @property
    def away(self) -> dict[str, str]:
        """Places of state and activations that rest away from the device, as the settings of ``[memory]`` in a recipe.

        Moments are left out where they rest in the same place as weights, as that is the default.
        """
        places = {
            kind: PLACES[int(getattr(self, kind))]
            for kind in AWAY
            if getattr(self, kind)
        }
        return {
            kind: place
            for kind, place in places.items()
            if kind != "moments" or place != places.get("weights")
        }

    @property
    def memory(self) -> dict[str, Any]:
        """The settings of ``[memory]`` in a recipe: places away from the device, tiles, and rows of the embedding."""
        settings: dict[str, Any] = dict(self.away)
        if self.tiles:
            settings["tiles"] = int(self.tiles)
        if self.embedding:
            settings["embedding"] = EMBEDDING[int(self.embedding)]
        return settings

    @property
    def halves(self) -> Num:
        """Number of parts in which a microbatch's tokens are computed.

        It is 2 if one part is computed while the sums of the other part travel over ``tp``, else 1.
        """
        return 1 + (np.asarray(self.overlap) > 0)

    @property
    def microbatches(self) -> Num:
        return np.maximum(1, np.ceil(self.batch / (self.data * self.micro_batch)))


@dataclass(frozen=True)
class Cost:
    """Seconds of a step on the slowest rank, by cause. Communication counts as far as compute does not hide it.

    Attributes:
        ``compute``, ``recompute``: forward and backward, and the part of forward that backward repeats.
        ``tp``, ``cp``, ``ep``, ``pp``, ``dp``: exposed communication along each axis; ``dp`` includes that of
            ``shard``.
        ``bubble``: time for which this rank waits in the pipeline. Ranks with less work are idle for longer;
            :attr:`weft.schedule.simulate.Simulation.bubble_rate`, a mean over the ranks, counts that as well.
        ``optimizer``: the update of the parameters.
        ``other``: stragglers and fixed costs.
        ``host``: exposed transfers of state and activations on the host or in files
            (:func:`weft.planner.tiers.with_tiers`).
    """

    compute: Num
    recompute: Num
    tp: Num
    cp: Num
    ep: Num
    pp: Num
    dp: Num
    bubble: Num
    optimizer: Num
    other: Num
    host: Num = 0.0

    @property
    def total(self) -> Num:
        return sum(getattr(self, part.name) for part in fields(self))


class AxisLink(NamedTuple):
    """Speed of collectives between the ranks along one axis of a layout.

    ``bandwidth``: bytes per second that each rank sends. ``ring_latency``: seconds that a collective in a ring takes
    in addition to the transfer of its bytes. ``tree_latency``: the same for a collective in a tree.
    """

    bandwidth: Num
    ring_latency: Num
    tree_latency: Num


def axis_link(
    machine: Machine, engine: EngineConstants, stride: Num, size: Num
) -> AxisLink:
    """Return bandwidth and latency of collectives over ``size`` ranks, whose numbers are ``stride`` apart.

    A domain is a group of devices joined by fast links. Inside one domain, the bandwidth is that of a fast link. Across
    domains, every member in a domain uses its own network link. The bandwidth is then the network's times the number of
    members in a domain, but never more than that of a fast link. Links between sites are counted in the same way.

    Inside a domain the latency is a fixed time, however many ranks take part. The latency across domains and sites
    grows with their number in a ring, and with the logarithm of their number in a tree. ``machine``: the cluster.
    ``engine``: constants of the training program, such as the share of the nominal bandwidth that it reaches.
    """
    inside = np.clip(machine.domain // stride, 1, size)
    local = np.clip(machine.site // stride, 1, size)
    link = machine.link
    out = inside < size
    far = local < size
    network = np.minimum(link, machine.network * engine.network * inside)
    bandwidth = np.where(out, network, link)
    bandwidth = np.where(
        far, np.minimum(bandwidth, machine.between * engine.network * local), bandwidth
    )
    nodes, sites = np.maximum(size / inside, 1), np.maximum(size / local, 1)
    within = machine.link_latency * (inside > 1)
    ring = (
        within
        + machine.network_latency * (nodes - 1)
        + far * machine.between_latency * (sites - 1)
    )
    tree = (
        within
        + machine.network_latency * np.log2(nodes)
        + far * machine.between_latency * np.log2(sites)
    )
    return AxisLink(bandwidth, ring, tree)


def gather(size: Num, full: Num, link: AxisLink, times: Num = 1.0) -> Num:
    """Return the seconds of ring all-gathers or reduce-scatters over ``size`` ranks, joined by ``link``.

    ``full``: bytes of all that is gathered or scattered. ``times``: number of collectives into which these bytes are
    divided. A larger ``times`` moves no more bytes, but adds the latency of each collective.
    """
    return (size > 1) * (
        (size - 1) / size * full / link.bandwidth + times * link.ring_latency
    )


def reduce(size: Num, full: Num, link: AxisLink, times: Num = 1.0) -> Num:
    """Return the seconds of all-reduces over ``size`` ranks, joined by ``link``.

    An all-reduce moves as many bytes as two all-gathers, and has the latency of a tree. ``full``: bytes of all that is
    reduced. ``times``: number of collectives into which these bytes are divided. A larger ``times`` moves no more
    bytes, but adds the latency of each collective.
    """
    return (size > 1) * (
        2 * (size - 1) / size * full / link.bandwidth + times * 2 * link.tree_latency
    )


def exchange(
    machine: Machine, engine: EngineConstants, stride: Num, size: Num, sent: Num
) -> Num:
    """Return the seconds of an all-to-all over ``size`` ranks, whose numbers are ``stride`` apart.

    Bytes for ranks in the same domain (the ``machine.domain`` devices that fast links join) go over fast links. All
    other bytes go over the sender's own network link. Both transfers run at once, so the slower one counts, and a
    latency is added. ``sent``: bytes that each rank holds before the exchange, those for itself included. ``engine``:
    constants of the training program, such as the share of the nominal bandwidth that it reaches.
    """
    inside = np.clip(machine.domain // stride, 1, size)
    out = sent * (size - inside) / size / (machine.network * engine.network)
    within = sent * (inside - 1) / size / machine.link
    return (size > 1) * (
        np.maximum(out, within) + axis_link(machine, engine, stride, size).tree_latency
    )


@dataclass(frozen=True)
class MicrobatchSeconds:
    """Seconds of one microbatch under a plan, from which the time of a step is computed.

    Attributes:
        ``forward``, ``backward``: compute of one layer in each pass.
        ``weight``: the part of ``backward`` that computes the gradients of weights.
        ``again``: recomputation of one layer's forward during backward.
        ``tp``, ``cp``, ``ep``: communication along each axis in the forward of one layer, without what compute hides.
        ``count``: by how much ``tp``, ``cp`` and ``ep`` are multiplied in a microbatch: 2 for forward and backward, or
            3 if backward computes the whole layer again.
        ``head``: output layer and loss, in forward and backward.
        ``hop``: the transfer from one pipeline stage to the next.
    """

    forward: Num
    backward: Num
    weight: Num
    again: Num
    tp: Num
    cp: Num
    ep: Num
    count: Num
    head: Num
    hop: Num

    @property
    def exposed(self) -> Num:
        return self.tp + self.cp + self.ep


def smooth_maximum(a: Num, b: Num) -> Num:
    """Return a smooth maximum of the positive times ``a`` and ``b``: their p-norm with a large exponent."""
    return (a**SHARP + b**SHARP) ** (1 / SHARP)


class AxisSeconds(NamedTuple):
    """Seconds that one layer communicates along each axis that cuts the layer: ``tp``, ``cp`` and ``ep``."""

    tp: Num
    cp: Num
    ep: Num


def element_bytes(plan: Plan) -> Num:
    """Return the bytes per element of activations and parameters: 4 for products in float32, else 2."""
    return 2 + 2 * (np.asarray(plan.bits) == 32)


@dataclass(frozen=True)
class Roofline:
    """Formulas for the seconds of one layer on one rank.

    ``shape``: the model; ``machine``: the cluster; ``plan``: the layout; ``engine``: constants that say how well the
    training program uses the machine.
    """

    shape: Shape
    machine: Machine
    plan: Plan
    engine: EngineConstants

    @property
    def tokens(self) -> Num:
        """Number of tokens that one rank computes in one microbatch."""
        return self.plan.micro_batch * self.plan.seq / self.plan.cp

    @property
    def width(self) -> Num:
        """Bytes per element of the operands of a matrix product."""
        return self.plan.bits / 8

    @property
    def element(self) -> Num:
        """Bytes per element of what is stored and sent: 4 for products in float32, else 2."""
        return element_bytes(self.plan)

    @property
    def routed(self) -> Num:
        """Token rows that the busiest rank receives for its experts in one microbatch.

        If tp does not cut the experts' width, each rank of tp routes its own part of the tokens.
        """
        own = self.tokens * expert_cut(self.plan, self.engine) / self.plan.tp
        return own * self.shape.top_k * self.shape.busiest(self.plan.ep)

    def product(self, m: Num, n: Num, k: Num) -> Num:
        """Return the seconds of the matrix product ``[m, k] @ [k, n]`` in forward.

        Backward has two products for it, the gradients of both factors, which take as long each.
        """
        rate = self.machine.peak * self.machine.clock * self.engine.matmul
        # weights are read once for each part of the tokens
        moved = self.width * (m * k + self.plan.halves * n * k)
        moved = moved + self.element * m * n
        return 2 * m * n * k / rate + moved / self.machine.hbm

    def feed_forward(self, tokens: Num, ffn: Num) -> Num:
        """Return the seconds in forward of the products of a feed-forward layer of width ``ffn``.

        ``tokens``: number of tokens that the rank processes.
        """
        up = (1 + self.shape.gated) * ffn
        embed = self.shape.embed
        return self.product(tokens, up, embed) + self.product(tokens, embed, ffn)

    def products(self) -> Num:
        """Return the seconds of a layer's matrix products in its forward pass, without attention scores."""
        shape, tokens, tp = self.shape, self.tokens, self.plan.tp
        matmuls = self.product(tokens, shape.qkv_width / tp, shape.embed)
        matmuls = matmuls + self.product(
            tokens, shape.embed, shape.heads * shape.head_dim / tp
        )
        local_experts = np.maximum(shape.experts / self.plan.ep, 1)
        share = np.maximum(self.routed / local_experts, 1)
        width = np.maximum(shape.expert_ffn, 1) / expert_cut(self.plan, self.engine)
        experts = local_experts * self.feed_forward(share, width)
        shared = self.feed_forward(tokens, np.maximum(shape.shared_ffn, 1) / tp)
        mixture = (shape.experts > 0) * experts + (shape.shared_ffn > 0) * shared
        return (
            matmuls
            + shape.dense_share * self.feed_forward(tokens, shape.ffn / tp)
            + (1 - shape.dense_share) * mixture
        )

    def attention(self) -> Num:
        """Return the seconds of a layer's attention in its forward pass.

        Scores that the causal mask hides count too; scores outside a window count only if attention is not fused.
        Fused attention takes as long as its products or as its bytes, whichever is longer.
        """
        shape, machine = self.shape, self.machine
        score = self.tokens * self.plan.seq * shape.heads / self.plan.tp
        # fused kernels skip what windows leave out
        near = score * shape.reach(self.plan.seq) / self.plan.seq
        rate = machine.peak16 * machine.fused * self.engine.attention
        fused = 2 * near * shape.score_dim / (rate * self.fill())
        read = fused_bytes(
            self.keys(), shape.score_dim, query_block(machine.fast, shape.score_dim)
        )
        rows = self.tokens / self.keys() * shape.heads / self.plan.tp
        fused = np.maximum(fused, rows * read / machine.hbm)
        split = (
            4 * score * shape.score_dim / (machine.peak16 * 0.5)
            # mask and softmax are one kernel in 16 bits alone, else two
            + (self.element / 2 + (self.element > 2))
            * self.engine.scores
            * score
            / machine.hbm
        )
        return np.where(self.engine.flash > 0, fused, split)

    def keys(self) -> Num:
        """Return the number of keys that one call of a rank's attention kernel reads.

        With context parallelism in a ring, a kernel works on the keys of one rank.
        """
        plan = self.plan
        whole = np.where(plan.context == ULYSSES, plan.seq, plan.seq / plan.cp)
        return np.minimum(whole, np.maximum(self.shape.reach(plan.seq), 1))

    def fill(self) -> Num:
        """Return the speed of fused attention, as a share of its speed for endless sequences and wide heads.

        Kernels lose time on blocks that the causal mask cuts, and on exponentials, of which a narrow head has more for
        each product. The result is 1 for an endless sequence and heads of width 128.
        """
        keys, head = self.keys(), self.shape.score_dim
        narrow = head / (head + EXPONENTIALS) * (1 + EXPONENTIALS / 128)
        return keys / (keys + HALF_SPEED) * narrow

    def pointwise(self) -> Num:
        """Return the seconds of a layer's norms, residuals, rotary embedding and activation in its forward pass."""
        shape, engine, tp = self.shape, self.engine, self.plan.tp
        moe = 1 - shape.dense_share
        norms = shape.embed / stream_cut(shape, self.plan, engine)
        # lower precisions read once more to scale and to cast
        casts = 1 + CASTS * (self.width < 2)
        inner = (shape.qkv_width + (1 + shape.gated) * shape.inner_width()) / tp
        inner = (
            inner + moe * shape.clamped * engine.rough * shape.top_k * shape.expert_ffn
        )
        routing = moe * engine.moe * shape.top_k * shape.embed
        moved = engine.elementwise * (norms + routing) + engine.inner * inner
        return casts * self.element / 2 * self.tokens * moved / self.machine.hbm

    def exchanges(self) -> AxisSeconds:
        """Return the seconds that a layer communicates along each axis in its forward pass."""
        shape, machine, plan, engine = self.shape, self.machine, self.plan, self.engine
        tokens, tp, cp = self.tokens, plan.tp, plan.cp
        along_tp = 2 * reduce(
            tp,
            self.element * tokens * shape.embed,
            axis_link(machine, engine, 1, tp),
            plan.halves,
        )
        kv = self.element * 2 * tokens * shape.kv_heads * shape.head_dim / tp
        heads = (
            self.element
            * tokens
            * (2 * shape.heads + 2 * shape.kv_heads)
            * shape.head_dim
            / tp
        )
        ring = gather(cp, kv * cp, axis_link(machine, engine, tp, cp))
        along_cp = np.where(
            plan.context == ULYSSES, exchange(machine, engine, tp, cp, heads), ring
        )
        # A token crosses to a domain once, however many of its experts are there.
        domains = np.maximum(1, plan.ep / np.minimum(machine.domain, plan.ep))
        apart = np.where(
            domains > 1, np.minimum(1.0, domains / np.maximum(shape.top_k, 1)), 1.0
        )
        rows = self.element * self.routed * shape.embed * apart
        cut = expert_cut(plan, engine)
        along_ep = (
            (1 - shape.dense_share) * 2 * exchange(machine, engine, cut, plan.ep, rows)
        )
        return AxisSeconds(along_tp, along_cp, along_ep)

    def hop(self) -> Num:
        """Return the seconds to send a microbatch from one pipeline stage to the next; every tp rank sends its part."""
        machine, plan = self.machine, self.plan
        stride = plan.world / plan.pp / np.where(plan.outer > 0, plan.dp, 1)
        pair, _, start = axis_link(machine, self.engine, stride, np.minimum(plan.pp, 2))
        # one of the hops does, and every microbatch waits for it
        leaves = stride * plan.pp > machine.site
        between = np.minimum(pair, machine.between * self.engine.network)
        pair = np.minimum(np.where(leaves, between, pair), machine.link)
        start = start + leaves * machine.between_latency
        # between ladder layers two tensors go
        width = (1 + self.shape.ladder) * self.shape.embed
        hop = self.element * self.tokens * width / plan.tp / pair + start
        return (plan.pp > 1) * hop


def passes(
    shape: Shape, machine: Machine, plan: Plan, engine: EngineConstants
) -> MicrobatchSeconds:
    """Return the seconds that one microbatch takes in one layer, in the output layer, and between pipeline stages.

    ``shape``: the model. ``machine``: the cluster. ``plan``: the layout, or many of them as arrays. ``engine``:
    constants that say how well the training program uses the machine.
    """
    parts = Roofline(shape, machine, plan, engine)
    matmuls, attention = parts.products(), parts.attention()
    pointwise = parts.pointwise()
    tp, cp, ep = parts.exchanges()
    cp = engine.exposed_cp * cp + np.maximum(
        0, (1 - engine.exposed_cp) * cp - attention
    )
    # The processor that launches can be slower than the device: a smooth maximum of the two, so that layouts of which
    # both are bound by launches still differ by their work. What communication adds is what it makes this maximum grow.
    moe = 1 - shape.dense_share
    floor = engine.kernels * LAUNCH * (1 + engine.dispatch * moe) * plan.halves
    busy = matmuls + attention + pointwise
    # A ladder's sums travel while as much computes; backward, which computes longer, hides no less.
    # So do those of one half of the tokens while the other half computes, but for the last sum of a pass.
    woven = (np.asarray(plan.overlap) > 0) * (
        1 - 0.5 / np.maximum(1, shape.layers / plan.pp)
    )
    tp = tp - np.maximum(shape.ladder, woven) * np.minimum(tp, busy)
    forward = smooth_maximum(busy, floor)
    # Backward: two products per product, 2.5 for fused attention (it recomputes the scores), twice the traffic.
    work = (
        (2 - shape.frozen) * matmuls
        + np.where(engine.flash > 0, 2.5, 2.0) * attention
        + 2 * pointwise
    )
    backward = smooth_maximum(work, 2 * floor)
    exposed = tp + cp + ep
    seen = (
        smooth_maximum(busy + exposed, floor)
        - forward
        + smooth_maximum(work + exposed, 2 * floor)
        - backward
    ) / 2
    seen = np.where(exposed > 0, seen / np.maximum(exposed, 1e-12), 1.0)
    full = plan.recompute == Recompute.FULL
    # What ends a layer has no successor that needs its result: PyTorch's checkpoint stops before it.
    last = engine.stops * shape.dense_share
    last = last * parts.product(parts.tokens, shape.embed, shape.ffn / plan.tp)
    again = np.where(full, smooth_maximum(busy - last, floor), 0.0)
    # Selective: scores again where they are written; under fused attention, half of the products.
    selective = np.where(
        engine.flash > 0, (1 - 0.5 * engine.products) * matmuls + pointwise, attention
    )
    again = again + (plan.recompute == Recompute.SELECTIVE) * selective
    tokens, vocab = parts.tokens, shape.vocab
    logits = engine.logits * parts.element / 2 * tokens * vocab / plan.tp / machine.hbm
    head = (3 - shape.frozen) * parts.product(
        tokens, vocab / plan.tp, shape.embed
    ) + logits
    return MicrobatchSeconds(
        forward, backward, matmuls, again, seen * tp, seen * cp, seen * ep, 2.0 + full, head, parts.hop()
    )  # fmt: skip


def stream_cut(shape: Shape, plan: Plan, engine: EngineConstants) -> Num:
    """Return over how many tp ranks the tokens of the residual stream are cut under ``plan``, as a mean over the
    layers.

    It is 1 in ladder layers, whose ranks hold all tokens, and in programs that do not cut norm regions. ``engine``:
    constants of the training program, which tell whether it cuts norm regions.
    """
    cut = np.where(engine.sequence > 0, plan.tp, 1.0)
    return cut / (1 + shape.ladder * (cut - 1))


def expert_cut(plan: Plan, engine: EngineConstants) -> Num:
    """Return the number of tp ranks over which ``plan`` cuts the hidden width of each expert.

    It is 1 where whole experts are spread over the tp ranks instead. ``engine``: constants of the training program,
    which tell whether it ever cuts an expert (:attr:`EngineConstants.whole`).
    """
    state = np.where(plan.shard > 1, plan.shard * plan.cp, plan.cp)
    folds = (plan.data * plan.cp % plan.ep == 0) & (
        (state % plan.ep == 0) | (plan.ep % state == 0)
    )
    return np.where(folds & (engine.whole == 0), plan.tp, 1)


def gradients(
    shape: Shape,
    machine: Machine,
    plan: Plan,
    engine: EngineConstants,
    layers: Num,
    cover: Num,
    turn: Num,
    copies: Num = 1,
) -> tuple[Num, Num]:
    """Return ``(communication, optimizer)``: seconds per step of a rank with ``layers`` layers.

    The communication is that of gradients and of sharded parameters, without the part that compute hides. The
    optimizer's seconds are those of the update of the parameters.

    ``machine``: the cluster; ``plan``: the layout; ``engine``: constants of the training program. ``cover``: seconds of
    compute in the whole step; with ZeRO-3, compute hides at most so many seconds. ``turn``: seconds of compute in one
    microbatch; without ZeRO-3, compute hides at most so many. ``copies``: number of copies of every parameter that the
    pipeline holds: 2 for DualPipe, else 1.
    """
    tp, cp = plan.tp, plan.cp
    replicas = plan.data * cp
    body = layers * shape.dense_weights / tp + shape.table / tp
    own = copies * (body + layers * shape.expert_weights / tp / plan.ep)
    link = axis_link(machine, engine, tp, replicas)
    parts = np.maximum(1, layers)  # a reduction and a gather for each
    summed = reduce(replicas, engine.gradient * own, link, parts)
    scattered = gather(
        replicas,
        (engine.gradient + element_bytes(plan)) * own,
        link,
        2 * np.maximum(1, engine.buckets * layers),
    )
    # Copies of sharded groups (HSDP): gathers stay inside a group, gradients cross to the copies once per step.
    inner = plan.state_ranks
    link_in = axis_link(machine, engine, tp, inner)
    apart = axis_link(
        machine, engine, tp * inner * np.where(plan.outer > 0, plan.pp, 1), plan.dp
    )
    across = reduce(plan.dp, engine.gradient * own / inner, apart, parts) * (
        plan.shard > 1
    )
    fetch3 = gather(inner, element_bytes(plan) * own, link_in, parts)
    reduce3 = gather(inner, engine.gradient * own, link_in, parts)
    sharded = plan.zero >= 3
    # A pipeline keeps gathered parameters over its microbatches, and gathers them once.
    m = plan.microbatches
    again3 = fetch3
    # backward gathers from the nearest ranks what forward has left there
    if np.any(plan.secondary):
        near = np.where(plan.secondary > 0, plan.secondary, inner)
        again3 = gather(
            near, element_bytes(plan) * own, axis_link(machine, engine, tp, near), parts
        )
    gathers = np.where(plan.pp > 1, 1, m) * (fetch3 + again3)
    # gradients of adapters are too few to count; frozen weights are gathered all the same
    learns = 1 - shape.frozen
    reduced = np.where(
        sharded, m * reduce3 + across, np.where(plan.zero >= 1, scattered, summed)
    )
    moved = sharded * gathers + learns * reduced
    hideable = (1 - engine.exposed_dp) * moved
    local = own / np.where(plan.zero >= 1, replicas, 1.0)
    updated = engine.update * local / machine.hbm * learns
    flattened = (replicas > 1) * engine.flattened * own / machine.hbm * learns
    return moved - np.minimum(
        hideable, np.where(sharded, cover, turn)
    ), updated + flattened


def schedules() -> tuple[str, ...]:
    """Return the names of all schedules, including plugins. A plan names a schedule by its index in this list."""
    return _in_order(tuple(names("schedule")))


@cache
def _in_order(registered: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(builders())


def schedule_number(name: str) -> int:
    return schedules().index(name)


def builder_numbered(number: Num) -> ScheduleBuilder:
    """Return the builder of the schedule with the index ``number`` in :func:`schedules`."""
    return builder_of(schedules()[int(number)])


def by_schedule(plan: Plan, form: Callable[[ScheduleBuilder], Num]) -> Num:
    """Return ``form(builder)``, where ``builder`` is the builder of the plan's pipeline schedule.

    If the fields of ``plan`` are arrays, with an entry for each of many plans, the result is an array as well.
    ``form``: a function that takes the builder of a schedule and returns a number or an array. The schedule 1F1B with
    several stages per rank counts as interleaved 1F1B.
    """
    looped = (plan.schedule == schedule_number("1f1b")) & (plan.virtual > 1)
    schedule, values = (
        np.where(looped, schedule_number("interleaved-1f1b"), plan.schedule),
        np.zeros(()),
    )
    for index in np.unique(schedule):
        values = np.where(schedule == index, form(builder_numbered(index)), values)
    return values


def copies(plan: Plan) -> Num:
    """Return how many copies of every parameter the pipeline of ``plan`` holds.

    They are 2 for schedules that run microbatches in both directions (DualPipe), else 1.
    """
    return 1 + by_schedule(plan, lambda builder: builder.twice) * (plan.pp > 1)


def rest(plan: Plan, engine: EngineConstants, known: Num) -> Num:
    """Return the seconds per step under ``plan`` that no formula explains: a constant, and the wait for stragglers.

    ``known``: the seconds that formulas explain. The wait for stragglers is a share of ``known``. This share is 0 for
    up to 8 ranks, and grows with each doubling of the ranks beyond 8. ``engine``: has the constant (``step``) and the
    growth per doubling (``jitter``).
    """
    return engine.step + engine.jitter * np.log2(np.maximum(plan.world / 8, 1)) * known


def most_layers(shape: Shape, stages: Num) -> Num:
    """Return the number of layers in the fullest of ``stages`` pipeline stages that are cut by number of layers."""
    even = np.ceil(shape.layers / stages) == shape.layers / stages
    # Where layers do not divide, embedding and head are counted as layers, as Megatron and Weft place them.
    return np.where(even, shape.layers / stages, np.ceil((shape.layers + 2) / stages))


def by_work(shape: Shape, plan: Plan) -> tuple[Num, Num]:
    """Return the numbers of layers in the first and last stage of a pipeline whose stages get equal shares of the work.

    Work is counted in layers. The embedding counts as no work. The output layer counts as its weights divided by the
    weights of a layer. A stage ends with the layer that fills its share of the work, as in nanotron.
    """
    share = (shape.layers + shape.table / shape.active_weights) / plan.pp
    return np.ceil(share), np.maximum(shape.layers - np.ceil(share * (plan.pp - 1)), 0)


class StageLayers(NamedTuple):
    """Numbers of layers in the stages of a pipeline.

    ``first`` and ``last``: layers of the first and of the last stage. ``most``: layers of the fullest stage between
    these. ``by_work``: how layers are shared out. If true, all stages take equal time, and the output layer is counted
    as well. If false, all stages have equally many layers.
    """

    first: Num
    most: Num
    last: Num
    by_work: Num


def stage_layers(shape: Shape, plan: Plan, engine: EngineConstants) -> StageLayers:
    """Return the numbers of layers in the pipeline stages of ``plan``.

    ``engine``: tells whether the program cuts pipelines by work or by number of layers.
    """
    most = most_layers(shape, plan.pp)
    ends = np.where(most == shape.layers / plan.pp, most, most - 1)
    level = (engine.level > 0) & (plan.pp > 1)
    first, last = by_work(shape, plan)
    return StageLayers(
        np.where(level, first, ends), most, np.where(level, last, ends), level
    )


def step_time(
    shape: Shape, machine: Machine, plan: Plan, engine: EngineConstants
) -> Cost:
    """Return the seconds of one optimizer step by cause, without the seconds that offloading adds.

    A critic with layers of its own takes its step before. ``shape``: the model; ``machine``: the cluster; ``plan``: the
    layout, or many of them as arrays. ``engine``: constants that say how well the training program uses the machine.
    """
    cost = _step_time(shape, machine, plan, engine)
    return with_critic_step(cost, shape, machine, plan, engine)


def with_critic_step(
    cost: Cost, shape: Shape, machine: Machine, plan: Plan, engine: EngineConstants
) -> Cost:
    """Return ``cost``, the seconds of a step of the model ``shape``, with those of a critic that has layers of its own.

    Without such a critic ``cost`` is returned unchanged. The other arguments are those of :func:`step_time`.
    """
    if not np.any(shape.critic):
        return cost
    # its output has one number
    alone = _step_time(replace(shape, vocab=1, critic=0), machine, plan, engine)
    both = {
        part.name: getattr(cost, part.name) + shape.critic * getattr(alone, part.name)
        for part in fields(Cost)
    }
    return Cost(**both)


def _step_time(
    shape: Shape, machine: Machine, plan: Plan, engine: EngineConstants
) -> Cost:
    """Return the seconds of a step of the model ``shape`` alone, as :func:`step_time` does."""
    layer_seconds = passes(shape, machine, plan, engine)
    layer = layer_seconds.forward + layer_seconds.backward
    # --- one stage, one microbatch
    stages = plan.pp
    first, most, last, level = stage_layers(shape, plan, engine)
    most = np.where(level, first, most)
    tail = np.maximum(0, last * layer + layer_seconds.head - most * layer) * (
        stages > 1
    ) + layer_seconds.head * (stages == 1)
    tail = np.where(level, 0.0, tail)
    m = plan.microbatches
    compute = m * (most * layer + tail)
    recompute = m * most * layer_seconds.again
    time_tp, time_cp, time_ep = (
        m * most * layer_seconds.count * each
        for each in (layer_seconds.tp, layer_seconds.cp, layer_seconds.ep)
    )

    # --- pipeline
    v = np.maximum(1, plan.virtual)
    # of a rank and microbatch
    turn = most * (
        layer + layer_seconds.again + layer_seconds.count * layer_seconds.exposed
    )
    ahead, weight = (
        most * (layer_seconds.forward + layer_seconds.exposed),
        most * layer_seconds.weight,
    )
    times = Times(ahead, turn - ahead - weight, weight)
    bubble = (stages > 1) * np.maximum(
        0.0, by_schedule(plan, lambda builder: builder.bubble(stages, m, v, times))
    )
    chunks = by_schedule(
        plan,
        lambda builder: (v if builder.free else builder.chunks) * (1 + builder.twice),
    )
    time_pp = (stages > 1) * 2 * layer_seconds.hop * (m * chunks + stages)
    cover = compute + recompute + time_tp
    time_dp, optimizer = gradients(shape, machine, plan, engine, most, cover, most * (layer + layer_seconds.again),
                                   copies(plan))  # fmt: skip
    known = (
        compute + recompute + time_tp + time_cp + time_ep + time_pp + time_dp + bubble
    )
    other = rest(plan, engine, known)
    return Cost(
        compute,
        recompute,
        time_tp,
        time_cp,
        time_ep,
        time_pp,
        time_dp,
        bubble,
        optimizer,
        other,
    )
