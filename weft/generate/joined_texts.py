"""Several streams of tokens over one cache: workers that see each other write (Hogwild), and Multiverse's paths.

**Hogwild! Inference** (Rodionov et al. 2025, 2504.06261): workers answer one prompt together. Each attends to the
prompt, to the present texts of all others, and to its own text, as if these stood one behind the other.

**Multiverse** (Yang et al. 2025, 2506.09991): the model itself decides where its text forks into paths. The paths begin
at the same position and do not attend to each other. The conclusion begins behind the longest path and attends to all
of them. Nothing is computed twice or copied: a text attends to others through their block tables.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from weft.errors import UsageError
from weft.generate.engine import Engine, check_prompt
from weft.generate.request import Generation, PrefixView, Request, check_generations
from weft.generate.sampling import Sampling
from weft.models.paged import KeyValuePages


def check_streams(engine: Engine, ids: Sequence[int]) -> None:
    """Raise :class:`UsageError` if ``engine`` cannot let several texts attend to each other, or if its model cannot
    continue the prompt ``ids``.
    """
    check_prompt(engine.model, ids)
    if not all(isinstance(pages, KeyValuePages) for pages in engine.reader.pages):
        raise UsageError(
            "streams see each other's keys, which linear attention does not keep; use one stream"
        )
    if engine.scheduler.cache_policy is not None:
        raise UsageError(
            "streams see all keys of each other, which a cache policy does not permit; leave out one of them"
        )
    if engine.model.mesh.size("dp", "pp") > 1:
        raise UsageError(
            "streams see each other's keys in the same step, which cp and pp keep apart; use tp"
        )
    if engine.model.shape.window:
        raise UsageError(
            "streams see all of each other, and this model's layers the last tokens only; use one stream"
        )


def check_room(engine: Engine, lengths: Collection[int]) -> None:
    """Raise :class:`UsageError` if texts of these ``lengths``, in tokens, do not fit together in the cache of
    ``engine``.
    """
    pool, limit = engine.scheduler.pool, engine.scheduler.limit
    blocks = sum(-(-tokens // pool.size) for tokens in lengths)
    if blocks > pool.blocks or len(lengths) > limit:
        raise UsageError(f"{len(lengths)} texts that see each other may need {blocks} of the cache's {pool.blocks} "
                         f"blocks and {len(lengths)} of {limit} requests at once; ask for fewer texts or tokens, or "
                         "give the engine more of both")  # fmt: skip


def hogwild(
    engine: Engine, prompt: Sequence[int], openings: Sequence[Sequence[int]], count: int, how: Sampling,
    stops: Collection[int] = (),
) -> list[Generation]:  # fmt: skip
    """Write several texts at the same time, one per worker, where each worker also attends to what all others have
    written (Hogwild inference, Rodionov et al. 2025). Return the texts in the order of ``openings``.

    ``prompt``: token ids that all workers see before their texts. ``openings``: for each worker, the token ids with
    which its text begins. ``count``: largest number of further tokens of each text. ``how``: settings of sampling, but
    each worker has a seed of its own. ``stops``: ids that end a text. Raises :class:`weft.errors.WeftError` if a text
    could not go on.
    """
    for ids in (prompt, *openings):
        check_streams(engine, ids)
    check_room(engine, [len(prompt) + 1, *(len(ids) + count for ids in openings)])
    root = Request(list(prompt), len(prompt), kept=True, pinned=True)
    workers = [
        Generation(list(ids), len(ids) + count - 1, prompt=len(ids), how=replace(how, seed=how.seed + i), stops=stops,
                   turned=True, kept=True, pinned=True)
        for i, ids in enumerate(openings)
    ]  # fmt: skip
    for worker in workers:
        worker.context = [
            PrefixView(root, len(prompt)),
            *(PrefixView(other, None) for other in workers if other is not worker),
        ]
    with engine.holding([root, *workers]):
        while not all(worker.finished for worker in workers):
            engine.step()
            check_generations(workers)
    return workers


class Tags(NamedTuple):
    """Ids of the tokens by which a model splits its text into parallel paths, which are written at the same time
    (Multiverse).

    Attributes:
        ``outline``: the token before each path's outline.
        ``split``: the token before all paths.
        ``path``, ``path_end``: the tokens before and after each path.
        ``conclusion``: the token before the text that follows all paths.
    """

    outline: int
    split: int  # the paths begin behind it
    path: int
    path_end: int
    conclusion: int


@dataclass
class Thread:
    """A text that can fork: a path, or the whole text.

    Attributes:
        ``pieces``: parts of the text, in order; between two parts the text forks into paths, which join again.
        ``paths``: paths that are being written now.
        ``done``: whether the text has ended.
    """

    pieces: list[Generation]
    paths: list["Thread"] = field(default_factory=list)  # those that are being written
    done: bool = False

    @property
    def end(self) -> int:
        """Position of the next token after the last piece of this text."""
        return self.pieces[-1].offset + len(self.pieces[-1].ids)

    @property
    def seen(self) -> list[PrefixView]:
        """The pieces of text to which the next piece of this text is to attend, in order. They are all pieces to which
        this text's last piece attends, followed by this last piece.
        """
        return [
            *self.pieces[-1].context,
            PrefixView(self.pieces[-1], len(self.pieces[-1].ids)),
        ]


def multiverse(
    engine: Engine, prompt: Sequence[int], tags: Tags, count: int, how: Sampling, stops: Collection[int] = (),
    opening: Callable[[int, list[int]], list[int]] = lambda number, outline: outline,
) -> Thread:  # fmt: skip
    """Generate a text after ``prompt`` that forks into parallel paths where the model writes the tags ``tags``
    (Multiverse, Yang et al. 2025), and return it. Each piece of the text has up to ``count`` tokens.

    ``how``: settings of sampling; ``stops``: ids that end a text. ``opening(number, outline)``: returns the first
    tokens of path ``number`` after its tag, given the tokens of its outline. Raises :class:`weft.errors.WeftError` if a
    piece could not go on.
    """
    check_streams(engine, prompt)
    pieces: list[Generation] = []

    def begin(
        ids: list[int],
        offset: int,
        context: Sequence[PrefixView],
        ends: Collection[int],
    ) -> Generation:
        own = replace(how, seed=how.seed + len(pieces))
        generation = Generation(ids, len(ids) + count - 1, prompt=len(ids), how=own, offset=offset,
                                context=tuple(context), stops={tags.split, *ends}, kept=True)  # fmt: skip
        pieces.append(generation)
        check_room(engine, [len(r.ids) if r.finished else r.most + 1 for r in pieces])
        engine.scheduler.add(generation)
        return generation

    def advance(thread: Thread, ends: Collection[int]) -> None:
        """Go on with a thread whose piece has ended, or all of whose paths have."""
        for path in thread.paths:
            advance(path, {tags.path_end})
        last = thread.pieces[-1]
        if thread.paths and all(path.done for path in thread.paths):
            shared = thread.seen  # by all of the paths
            seen = [
                *shared,
                *(view for path in thread.paths for view in path.seen[len(shared) :]),
            ]
            offset = max(path.end for path in thread.paths)
            thread.pieces.append(begin([tags.conclusion], offset, seen, ends))
            thread.paths = []
        elif last.finished and not thread.paths and not thread.done:
            if last.stopped is not None:
                last.ids.append(last.stopped)  # what follows sees the tag too
            outlines = outlines_of(last, tags) if last.stopped == tags.split else []
            thread.done = not outlines
            thread.paths = [
                Thread(
                    [
                        begin(
                            [tags.path, *opening(i, outline)],
                            thread.end,
                            thread.seen,
                            {tags.path_end},
                        )
                    ]
                )
                for i, outline in enumerate(outlines)
            ]

    whole = Thread([])
    with engine.holding(pieces):
        whole.pieces.append(begin(list(prompt), 0, (), stops))
        while not whole.done:
            engine.step()
            check_generations(pieces)
            advance(whole, stops)
    return whole


def outlines_of(piece: Generation, tags: Tags) -> list[list[int]]:
    """Return the token ids of each outline in ``piece``, one list per path, in their order. An outline begins behind a
    tag ``tags.outline``, and ends before the next such tag or the last token of ``piece``.
    """
    written = piece.written[:-1]
    places = [i for i, token in enumerate(written) if token == tags.outline]
    return [
        written[a + 1 : b]
        for a, b in zip(places, [*places, len(written)][1:], strict=True)
    ]
