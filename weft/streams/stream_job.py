"""From a recipe with ``[stream]`` to a job whose samples simulators send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.cache import digest
from weft.data.loader import Corpus
from weft.data.order import Order, hash_keys
from weft.data.tokenizer import load_tokenizer
from weft.streams.array_columns import ArrayColumns
from weft.streams.simulator_processes import words_of
from weft.streams.stream_loader import KnownLoader, KnownRows, StreamLoader, shared_rows
from weft.train.setup import Job, completed_job

if TYPE_CHECKING:
    from weft.data.order import RowList
    from weft.data.tokenizer import Tokenizer
    from weft.layout.mesh import Mesh
    from weft.parallel.build import Built
    from weft.recipe import Recipe
    from weft.recipe.stream_section import SampleStream
    from weft.streams.stream_source import StreamSource
    from weft.train.step_loader import RunRecords

#: Samples of random numbers on which proofs compare layouts.
PROOF = 512


class HeldOut:
    """Samples for validation. ``rows``: the samples, float32 ``[samples, width]``; None: simulators have not made them
    yet. They make them before training begins.
    """

    def __init__(self) -> None:
        self.rows: KnownRows | None = None


@dataclass(frozen=True)
class StreamJob(Job):
    """A checked recipe with ``[stream]``, from which its loaders are made.

    Attributes:
        ``held_out``: samples for validation; None if the recipe asks for none.
    """

    held_out: HeldOut | None = None

    @property
    def stream(self) -> SampleStream:
        """The recipe's section ``[stream]``."""
        assert self.recipe.stream is not None
        return self.recipe.stream

    @property
    def columns(self) -> ArrayColumns:
        """Names and shapes of a sample's arrays: the model's inputs, then its outputs."""
        return ArrayColumns({**self.shape.inputs, **self.shape.outputs})

    def loader(self, order: Order | RowList, mesh: Mesh) -> KnownLoader:  # type: ignore[override]
        """Return a loader for the data in ``order``. For validation data it has the samples for validation. For
        training data it has random numbers, with which proofs compare layouts.
        """
        if order is self.corpus.train:
            keys = np.arange(PROOF)[:, None], np.arange(self.columns.width)
            drawn = hash_keys(self.recipe.train.seed, *keys) / 2.0**63 - 1
            rows = KnownRows(drawn.astype(np.float32))
            return KnownLoader(rows, self.columns, self.recipe, mesh, repeats=True)
        assert self.held_out is not None and self.held_out.rows is not None
        return KnownLoader(self.held_out.rows, self.columns, self.recipe, mesh)

    def training_loader(
        self, mesh: Mesh, built: Built, recorder: RunRecords, interrupted: Callable[[], bool], stack: ExitStack,
        kept: dict[str, Any],
    ) -> StreamLoader:  # fmt: skip
        """Return the loader of the samples that simulators send, after the samples for validation have been made.
        Collective. The arguments are those of :meth:`Job.training_loader`.
        """
        if self.held_out is not None and self.held_out.rows is None:
            self.held_out.rows = self._held_out_rows(mesh, recorder, interrupted)
        loader = StreamLoader(
            self.recipe, self.columns, mesh, recorder, interrupted, kept, partial(self._open_source, recorder),
        )  # fmt: skip
        stack.callback(loader.close)
        return loader

    def _open_source(
        self, recorder: RunRecords, state: Mapping[str, Any] | None
    ) -> StreamSource:
        from weft.streams.stream_source import StreamSource

        folder, encrypt = recorder.folder / "simulators", self.recipe.resilience.encrypt
        seed = self.recipe.data.seed
        return StreamSource(self.stream, self.columns, seed, folder, encrypt, state)

    def _held_out_rows(
        self, mesh: Mesh, recorder: RunRecords, interrupted: Callable[[], bool]
    ) -> KnownRows:
        """Run the simulators of ``stream.held_out`` on the first rank, and return their samples on all. Collective."""
        from weft.streams.stream_source import all_samples

        def rows() -> np.ndarray:
            return all_samples(
                self.stream.held_out, self.stream, self.columns, recorder.folder / "simulators",
                lambda: not interrupted(),
            )  # fmt: skip

        collected: list[np.ndarray] = []

        def count() -> int:
            collected.append(rows())
            return len(collected[0])

        shape = (mesh.on_main(count), self.columns.width)
        return KnownRows(shared_rows(collected[0] if collected else None, shape, mesh))


def prepare_stream(recipe: Recipe) -> StreamJob:
    """Complete the model's shape in ``recipe``, check that all its settings fit together, and return the job. Raises
    :class:`UsageError` or :class:`weft.errors.WeftError` if they do not.
    """
    assert recipe.stream is not None
    for command in (*recipe.stream.producers, *recipe.stream.held_out):
        words_of(command)
    job = completed_job(recipe, partial(_corpus, recipe), StreamJob)
    return replace(job, held_out=HeldOut() if recipe.stream.held_out else None)


def _corpus(recipe: Recipe, own: Tokenizer | None) -> Corpus:
    """Return a corpus without documents, which names the stream."""
    stream = recipe.stream
    assert stream is not None
    tokenizer = load_tokenizer("bytes", (), recipe.data.cache)
    who = [*stream.producers, *([stream.listen] if stream.listen else [])]
    # by its place here each of them is known in a checkpoint
    identity = digest([*stream.producers])
    held_out = Order((), (), 1) if stream.held_out else None
    return Corpus(
        tokenizer, Order((), (), 0), held_out, f"samples of {', '.join(who)}", identity
    )
