"""Which request moves to which engine, so that no engine runs out of memory while others have much (Llumnix)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weft.cluster.dispatch_policy import EngineView

#: Free cache blocks per answer below which an engine gives requests away, and above which it takes some.
LOW, HIGH = 8.0, 16.0
#: Seconds in which an answer that has moved, or was not taken in elsewhere, does not move again.
REST_S = 2.0


class MovableAnswer(NamedTuple):
    """An answer that can move from its engine to another one. ``number``: number of the answer. ``blocks``: number of
    cache blocks of its text. ``priority``: a smaller number is more urgent.
    """

    number: int
    blocks: int
    priority: int


class BalancingMove(NamedTuple):
    """Decision to move an answer to another engine. ``number``: number of the answer; ``target``: name of the engine to
    which it moves.
    """

    number: int
    target: str


def balancing_move(
    views: Sequence[EngineView], answers: Mapping[str, Sequence[MovableAnswer]]
) -> BalancingMove | None:
    """Return a move of one answer from the engine with the least free memory per answer to the engine with the most.

    ``views``: the state of each engine, as dispatch policies see it. ``answers``: for each engine, by its name, the
    answers that it can give away. A move helps if the target still has more free memory per answer than the source
    afterwards. Of the moves that help, that of the least urgent answer is returned; among equally urgent answers it is
    the one with the fewest cache blocks. Returns None if the engines are balanced well enough, or if no move helps.
    """
    if len(views) < 2:
        return None
    source = min(views, key=lambda view: view.freeness)
    target = max(views, key=lambda view: view.freeness)
    if source.freeness >= LOW or target.freeness <= HIGH:
        return None
    for answer in sorted(answers[source.name], key=lambda a: (-a.priority, a.blocks)):
        full = target._replace(
            usage=target.usage + answer.blocks, answers=target.answers + 1
        )
        rest = source._replace(
            usage=source.usage - answer.blocks, answers=source.answers - 1
        )
        if full.freeness > rest.freeness and full.usage <= full.blocks:
            return BalancingMove(answer.number, target.name)
    return None
