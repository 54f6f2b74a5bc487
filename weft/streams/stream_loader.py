"""The batches of a training on a stream: samples that the first rank draws, and deals to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from weft.data.batch import IGNORE, Batch
from weft.errors import WeftError
from weft.layout.mesh import from_all
from weft.streams.array_columns import ArrayColumns

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.recipe import Recipe
    from weft.streams.stream_source import StreamSource
    from weft.train.step_loader import RunRecords

#: Seconds that the first rank waits for samples before all ranks look whether one is asked to end the run.
TURN_S = 1.0


def shared_rows(rows: np.ndarray | None, shape: tuple[int, int], mesh: Mesh) -> np.ndarray:  # fmt: skip
    """Send ``rows`` from the first rank to all ranks, and return them: float32 of the given ``shape``. ``rows`` is read
    on the first rank only. Collective.
    """
    group = mesh.step_group
    if group is None or group.size() == 1:
        assert rows is not None
        return rows
    values = torch.zeros(shape) if rows is None else torch.from_numpy(np.ascontiguousarray(rows))  # fmt: skip
    values = values.to(mesh.device)
    dist.broadcast(values, group_src=0, group=group)
    return values.cpu().numpy()


def array_batches(
    rows: np.ndarray, columns: ArrayColumns, recipe: Recipe, mesh: Mesh, position: int
) -> list[Batch]:
    """Return the batches of this rank, one per pass, for a step's samples ``rows``, float32 ``[samples, width]``. The
    ranks get equal shares of the samples in order; shares of the last ranks may be padded. ``columns``: arrays of a
    sample. ``position``: index of the first sample in the training order.
    """
    layout = recipe.batch_layout(mesh.layout)
    per_pass, passes = recipe.rows_per_pass(mesh.layout)
    replica = mesh.rank("dp") * layout.dp // mesh.layout.dp
    rank = replica * mesh.size("shard") + mesh.rank("shard")
    ranks = layout.size("dp", "shard")
    share = -(-recipe.train.batch // ranks)
    numbers = range(position, position + len(rows))[share * rank : share * (rank + 1)]
    batches = []
    for i in range(passes):
        own = numbers[per_pass * i : per_pass * (i + 1)]
        batches.append(_batch(rows, columns, own, position, per_pass))
    return batches


def _batch(
    rows: np.ndarray, columns: ArrayColumns, numbers: range, position: int, count: int
) -> Batch:
    """Return a batch of ``count`` rows, of which the first are the samples ``numbers`` and the others padding."""
    first = numbers.start - position
    values = np.zeros((count, columns.width), np.float32)
    values[: len(numbers)] = rows[first : first + len(numbers)]
    labels = torch.full((count, 1), IGNORE)
    labels[: len(numbers)] = 0
    zeros = torch.zeros(count, 1, dtype=torch.int64)
    arrays = {name: torch.from_numpy(x) for name, x in columns.unpack(values).items()}
    edges = torch.arange(count + 1, dtype=torch.int32)
    return Batch(zeros, labels, zeros, edges, samples=tuple(numbers), arrays=arrays)


@dataclass(frozen=True)
class KnownRows:
    """Samples that are known before training, such as those for validation. All ranks have them.

    ``rows``: their values, float32 ``[samples, width]``.
    """

    rows: np.ndarray

    @property
    def total(self) -> int:
        """Number of all samples."""
        return len(self.rows)


@dataclass(frozen=True)
class KnownLoader:
    """Loader of samples that are known before training.

    ``order``: the samples. ``columns``: arrays of a sample. ``recipe``: recipe of the run. ``mesh``: this rank's
    position. ``repeats``: whether the samples begin again at their end.
    """

    order: KnownRows
    columns: ArrayColumns
    recipe: Recipe
    mesh: Mesh
    repeats: bool = False

    def island_samples(self, position: int) -> range:
        """Return the indices, in the training order, of the samples of one step. ``position``: index of its first
        sample.
        """
        end = position + self.recipe.train.batch
        return range(position, end if self.repeats else min(end, self.order.total))

    def step(self, position: int) -> list[Batch] | None:
        """Return the batches of this rank, one per pass, for the step that starts at sample ``position``; None if the
        samples have ended.
        """
        numbers = self.island_samples(position)
        if not numbers:
            return None
        rows = self.order.rows[np.array(numbers) % self.order.total]
        return array_batches(rows, self.columns, self.recipe, self.mesh, position)


@dataclass
class StreamLoader:
    """Loader whose samples come from simulators while the model learns. All methods but :meth:`island_samples` are
    collective.

    Attributes:
        ``recipe``: the checked recipe.
        ``columns``: arrays of a sample.
        ``mesh``: this rank's position among the ranks of the run.
        ``recorder``: writes the run's records, and prints lines.
        ``interrupted``: function that returns whether this rank is asked to end the run.
        ``kept``: JSON values for checkpoints: states of the stream before and after the last step, by the position at
            which each holds.
        ``open_source``: function that opens the source of samples on the first rank; it gets the state of the stream in
            a checkpoint, or None.
        ``over``: why there are no samples for the next step; "" if there are.
    """

    recipe: Recipe
    columns: ArrayColumns
    mesh: Mesh
    recorder: RunRecords
    interrupted: Callable[[], bool]
    kept: dict[str, Any]
    open_source: Callable[[Mapping[str, Any] | None], StreamSource]
    over: str = ""
    source: StreamSource | None = None
    _position: int = -1
    _rows: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))

    @property
    def _draws(self) -> bool:
        """Whether this rank is the one that draws."""
        group = self.mesh.step_group
        return group is None or group.rank() == 0

    def island_samples(self, position: int) -> range:
        """Return the indices, in the training order, of the samples of one step. ``position``: index of its first
        sample.
        """
        count = len(self._rows) if position == self._position else self.recipe.train.batch  # fmt: skip
        return range(position, position + count)

    def questions(self) -> dict[str, Any]:
        """Return an empty dict, because this loader brings no evaluations of its own
        (:meth:`weft.train.step_loader.StepLoader.questions`).
        """
        return {}

    def is_ready(self, position: int) -> bool:
        """Return whether the samples of the step that starts at sample ``position`` were drawn already."""
        return position == self._position

    def make_ready(self, position: int) -> bool:
        """Draw the samples of the step that starts at sample ``position``, and wait for them. Return whether they were
        drawn. It is False if a rank is asked to end the run meanwhile, or at the end of the stream; :attr:`over` then
        says why.
        """
        while True:
            rows, failure = None, ""
            if self._draws:
                try:
                    rows = self._drawn(position)
                except WeftError as error:
                    failure = str(error)
            count = -1 if rows is None else len(rows)
            said = from_all(
                (count, self.over, failure, self.interrupted()), self.mesh.step_group
            )
            count, self.over, failure, _ = said[0]
            if failure:
                raise WeftError(failure)
            if count > 0:
                shape = (count, self.columns.width)
                self._rows = shared_rows(rows, shape, self.mesh)
                self._position = position
                return True
            if self.over or any(asked for *_, asked in said):
                return False

    def step(self, position: int) -> list[Batch]:
        """Return the batches of this rank, one per pass, of the step that starts at sample ``position``."""
        assert position == self._position, "make_ready comes first"
        return array_batches(self._rows, self.columns, self.recipe, self.mesh, position)

    def close(self) -> None:
        """Tell the simulators that the training is over, and record how often samples were drawn."""
        if self.source is None:
            return
        store, waited = self.source.store, self.source.waited
        self.source.close()
        self._say_lines(self.source)
        times = sorted(store.repetitions().items())
        self.recorder.log(
            "repetitions", samples={str(count): many for count, many in times}
        )
        drawn = [(count, many) for count, many in times if count]
        if not drawn:
            return
        samples = sum(many for _, many in drawn)
        undrawn = sum(many for count, many in times if not count)
        self.recorder.event(
            f"stream: {store.received:,} samples have come, {samples:,} were drawn {drawn[0][0]} to {drawn[-1][0]} "
            f"times, {store.drawn / samples:.2f} on average; {waited:.1f} s were spent in waiting for samples"
            + (f"; {undrawn:,} that had come were not drawn" if undrawn else "")
        )

    def _drawn(self, position: int) -> np.ndarray | None:
        """Return the samples of a step, on the rank that draws; None if they have not come within a while."""
        if self.source is None:
            state = kept_at(self.kept, position)
            self.source = self.open_source(state)
            self.kept["streams"] = [[position, state or self.source.store.state()]]
        source, before = self.source, self.kept["streams"][-1][1]
        drawn = source.draw(self.recipe.train.batch, TURN_S)
        self._say_lines(source)
        if drawn is None:
            if source.is_exhausted:
                self.over = self._why_over(source)
            return None
        end = position + len(drawn.rows)
        self.kept["streams"] = [[position, before], [end, source.store.state()]]
        store = source.store
        self.recorder.log(
            "stream", received=store.received, drawn=store.drawn, buffer=store.size,
            undrawn=sum(len(p.undrawn) for p in store.producers.values()), waited_s=round(source.waited, 4),
        )  # fmt: skip
        return drawn.rows

    def _why_over(self, source: StreamSource) -> str:
        store = source.store
        if not store.received:
            whys = [f"; {n} was refused: {p.refused}" for n, p in store.producers.items() if p.refused]  # fmt: skip
            raise WeftError(
                f"no sample has come, and all simulators have ended{''.join(whys[:1])}"
            )
        return f"the stream ended after {store.received:,} samples, which were drawn {store.drawn:,} times"

    def _say_lines(self, source: StreamSource) -> None:
        while source.lines:
            self.recorder.event(source.lines.popleft())


def kept_at(kept: Mapping[str, Any], position: int) -> Mapping[str, Any] | None:
    """Return the state of the stream that ``kept`` has for the step that starts at sample ``position``; None for a new
    stream. Raises :class:`WeftError` if ``kept`` has states of other steps only.
    """
    streams = kept.get("streams", [])
    for at, state in streams:
        if at == position:
            return dict(state)
    if not streams:
        return None
    # the last step of a stream may have had fewer samples than it counts
    at, state = streams[-1]
    if at < position:
        return dict(state)
    raise WeftError(
        f"the checkpoint has the stream at sample {at}, and the run goes on at sample {position}; go on from the last "
        "checkpoint"
    )
