"""Turns in which ranks write answers together: one of a group holds the engine, and the others compute with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from weft.generate.engine import Engine
from weft.generate.leader import follow_leader
from weft.generate.reader import PagedReader
from weft.models.invariant import is_invariant
from weft.rl.generation_model import use_huge_copies

if TYPE_CHECKING:
    from weft.generate.leader import Follower
    from weft.generate.request import Written
    from weft.generate.written_passes import WrittenPasses
    from weft.rl.generation_model import GenerationModel


class FollowingEngine:
    """Takes the place of the engine on ranks other than the first of a group that generates together.

    Only the first rank has an engine and takes requests; this object computes along with it. It has the methods of
    :class:`weft.generate.engine.Engine` that all ranks of the group call. ``generation``: the model that generates.
    """

    def __init__(self, generation: GenerationModel) -> None:
        self.model = generation.model
        self.reader: Follower | None = None

    def follow(self) -> None:
        """Compute this rank's part of all steps until the first rank's engine rests or ends."""
        self.reader = follow_leader(self.model, self.reader)

    def weights_changed(self, version: int, fingerprint: str = "") -> list[Written]:
        """Return an empty list, because only the first rank has texts in progress, whose tokens it returns.

        ``version``, ``fingerprint``: those of the new weights, which only the first rank needs.
        """
        return []

    def close(self) -> None:
        """Compute this rank's part of all further steps, until the first rank's engine ends."""
        self.follow()


def open_turns(
    generation: GenerationModel, tokens: int, limit: int, alike: bool = False
) -> GenerationTurns:
    """Open the engine of this rank's group, and return this rank's part in generation. All ranks of the group must call
    it.

    ``generation``: the model that generates. ``tokens``: number of tokens that the engine's cache holds. ``limit``:
    largest number of answers that are written at a time. ``alike``: whether log-probabilities equal those of training
    to the last bit.
    """
    several = generation.mesh.layout.world > 1
    if several and not generation.leads:
        return GenerationTurns(generation, FollowingEngine(generation))
    engine = Engine(
        generation.model, tokens=tokens, limit=limit, ranks=several, invariant=alike
    )
    engine.record_graphs()
    return GenerationTurns(generation, engine)


class GenerationTurns:
    """A rank's part in generation: it runs an engine, or computes along with the rank that does.

    ``generation``: the model that generates. ``engine``: this rank's engine. ``passes`` (attribute): keeps what the
    passes of an engine on one rank compute; None: nothing does.
    """

    passes: WrittenPasses | None = None

    def __init__(
        self, generation: GenerationModel, engine: Engine | FollowingEngine
    ) -> None:
        self.generation, self.engine = generation, engine

    def own(self, numbers: Sequence[int]) -> list[int]:
        """Return the question numbers, out of ``numbers``, whose answers this rank's engine writes. Ranks without an
        engine get an empty list.
        """
        if not self.generation.leads:
            return []
        group, groups = self.generation.group, self.generation.groups
        return [number for number in numbers if number % groups == group]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Return a context in which the first rank of each group generates. Collective over a group.

        The other ranks compute along when they enter the context, and its body runs on them only after the first rank
        has finished. Within the context all of them use packed copies of the weights, unless log-probabilities must
        equal those of training to the last bit.
        """
        copies = nullcontext() if is_invariant() else self.generation.copies
        if isinstance(self.engine, FollowingEngine):
            with copies:
                use_huge_copies(self.generation.copies)
                self.engine.follow()
            yield
            return
        try:
            self._keep(self.passes)
            with copies:
                use_huge_copies(self.generation.copies)
                try:
                    yield
                finally:
                    self.engine.rest()
        finally:
            self._keep(None)

    def _keep(self, passes: WrittenPasses | None) -> None:
        """Let ``passes`` keep what the engine's passes compute; None: nothing keeps it."""
        self.generation.copies.keeper = passes
        if isinstance(self.engine.reader, PagedReader):
            self.engine.reader.kept = passes
