"""Times, bytes and memory of a sampling table before anything runs, by the sizes of a denoiser and of a device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from weft.diffusion.sampling_actions import HIDDEN, OPEN, A, E, K, P, U, piece_of
from weft.diffusion.sampling_check import RunnableTable
from weft.diffusion.sampling_table import DenoisingRow
from weft.schedule.actions import Action, Value
from weft.schedule.simulate import Costs, Simulation, simulate


@dataclass(frozen=True)
class DenoiserSizes:
    """Sizes of a denoiser and its batch, from which operations and bytes follow.

    Attributes:
        ``width``: width of the model.
        ``ffn``: width of its feed-forward.
        ``values``: number of values of a token.
        ``rows``: number of rows of a batch: the samples, or twice as many with guidance.
        ``text``: number of text tokens that cross-attention reads; 0 without cross-attention.
        ``bytes``: bytes per element of an activation.
    """

    width: int
    ffn: int
    values: int
    rows: int = 1
    text: int = 0
    bytes: int = 2

    def projection(self, tokens: int) -> float:
        """Return the floating-point operations of a layer's query, key and value projections for ``tokens`` tokens."""
        return self.rows * tokens * 6.0 * self.width**2

    def rest(self, tokens: int, keys: int) -> float:
        """Return the floating-point operations of a layer without the query, key and value projections.

        ``tokens``: number of tokens. ``keys``: number of keys that each attends to.
        """
        feed_forward = 4.0 * self.width * self.ffn
        attention = 4.0 * keys * self.width + 2.0 * self.width**2
        text = (4.0 * self.text * self.width + 4.0 * self.width**2) * bool(self.text)
        return self.rows * tokens * (attention + feed_forward + text)


@dataclass(frozen=True)
class SamplingDevice:
    """Speeds of a device and of its network link, for the simulator.

    Attributes:
        ``flops``: floating-point operations per second in large products.
        ``bandwidth``: bytes per second that a rank sends.
        ``latency``: seconds of the smallest transfer.
        ``overhead``: shortest time of a layer in seconds, however few its tokens.
        ``half``: number of tokens at which the device reaches half of ``flops``.
    """

    flops: float
    bandwidth: float = float("inf")
    latency: float = 0.0
    overhead: float = 0.0
    half: float = 0.0

    def seconds(self, operations: float, tokens: int) -> float:
        """Return the seconds of ``operations`` floating-point operations in matrix products over ``tokens`` tokens."""
        return operations / self.flops * (tokens + self.half) / tokens


def denoised_tokens(runnable: RunnableTable, row: DenoisingRow) -> int:
    """Return the number of tokens that one rank computes in ``row``, an entry of the sampling table ``runnable``;
    further tokens of other blocks that the row computes count too.
    """
    blocks = runnable.source.blocks
    joined = runnable.actions.joined(row)
    return sum(blocks[block] for block in row.queries) + sum(
        key.end - key.first for key in joined
    )


def seen_tokens(runnable: RunnableTable, row: DenoisingRow) -> float:
    """Return the mean number of keys to which a token attends in ``row``, an entry of the sampling table
    ``runnable``.
    """
    source = runnable.source
    if source.window is None:
        return float(sum(key.end - key.first for key in row.keys))
    near = (2 * source.window + 1) * source.unit
    far = sum(key.end - key.first for key in row.keys if key.far)
    return float(min(near + far, sum(key.end - key.first for key in row.keys)))


def value_bytes(
    runnable: RunnableTable, sizes: DenoiserSizes
) -> Callable[[Value], float]:
    """Return a function that gives the bytes of each value (tensor between computations) of the sampling table
    ``runnable``: keys and values, latents, or hidden states. ``sizes``: sizes of the denoiser and its batch.
    """
    actions = runnable.actions

    @cache
    def of(value: Value) -> float:
        piece = piece_of(value)
        if value.name == OPEN:
            return 0.0
        if value.name == HIDDEN:
            tokens = denoised_tokens(runnable, actions.row_writing(value))
            return float(tokens * sizes.width * sizes.rows * sizes.bytes)
        assert piece is not None
        each = 2 * sizes.width if piece.kind == "kv" else sizes.values
        return float((piece.end - piece.first) * each * sizes.rows * sizes.bytes)

    return of


def bytes_between(runnable: RunnableTable, sizes: DenoiserSizes) -> dict[tuple[int, int], float]:  # fmt: skip
    """Return how many bytes each rank sends to each other rank while the sampling table ``runnable`` runs, by the pair
    (sender, receiver). ``sizes``: sizes of the denoiser and its batch.
    """
    of, total = value_bytes(runnable, sizes), dict[tuple[int, int], float]()
    for action in runnable.lowered:
        if action.kind == "SEND":
            pair = (action.rank, action.peer)
            total[pair] = total.get(pair, 0.0) + of(action.reads[0])
    return total


def simulated_sampling(
    runnable: RunnableTable, sizes: DenoiserSizes, device: SamplingDevice
) -> Simulation:
    """Simulate the sampling table ``runnable``: the times of computations and transfers, and the memory of values.

    If a rank sends a value to several ranks, the copies share its link. Transfers overlap with computation. Memory is
    in bytes, without weights. ``sizes``: sizes of the denoiser and its batch. ``device``: speeds of the device and its
    link.
    """
    actions = runnable.actions
    of = value_bytes(runnable, sizes)
    readers: dict[Value, set[int]] = {}
    for action in actions.table:
        for value in action.reads:
            readers.setdefault(value, set()).add(action.rank)

    def compute(action: Action) -> float:
        if action.kind not in (E, K, A, P, U):
            return 0.0
        if action.kind == U and runnable.source.tiles is not None:
            return 0.0  # the last layer is in the prediction
        row = actions.row_of(action)
        tokens = denoised_tokens(runnable, row)
        if action.kind == K:
            return device.seconds(sizes.projection(tokens), tokens) + device.overhead
        if action.kind == A:
            keys = seen_tokens(runnable, row)
            return device.seconds(sizes.rest(tokens, int(keys)), tokens)
        ends = 2.0 * tokens * sizes.rows * sizes.width * sizes.values
        return device.seconds(ends, tokens)

    def move(value: Value, source: int, target: int) -> float:
        others = len(readers[value] - {source})
        return device.latency + of(value) * others / device.bandwidth

    return simulate(actions.table, Costs(compute, move, of, exclusive=True))
