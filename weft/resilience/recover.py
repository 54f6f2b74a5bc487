"""Chooses the copies from which the state is restored after a loss, and moves it into the next view's layout.

Every member says which copies it holds (:meth:`weft.resilience.snapshots.Snapshots.held`). From that all members work
out the same answer: the newest step for which each part of the old layout is held by some member, and which member
gives it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from weft.checkpoint.run_state import Progress
from weft.layout.parts import Part
from weft.parallel.state import State
from weft.resilience.snapshots import Snapshots

#: The name, among a member's facts, of its list of copies: one entry for each view that it has copies of.
FACT = "snapshots"

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Recovery:
    """State to which all ranks go back after a loss, and who has it: copies in the ranks' memory.

    An *old* rank is a rank of the view (set of ranks) that made the copies. A *new* rank is one of the view that
    continues. The state of an old rank consists of numbered segments, which are groups of tensor parts.

    Attributes:
        ``epoch``: number of the old view.
        ``progress``: progress of the run at that state.
        ``gives``: for each new rank, the segments that it sends to the others. A segment is given as a pair: the old
            rank whose state was copied, and the segment's number.
        ``helpers``: pairs of a new rank and a lost old rank. The new rank sends the parts of the state that only the
            old rank held, from its copy of them.
        ``differing``: new ranks whose copies differ from those of most ranks that held the same parts. These copies are
            not used.
    """

    epoch: int
    progress: Progress
    gives: tuple[tuple[tuple[int, int], ...], ...]
    helpers: tuple[tuple[int, int], ...]
    differing: tuple[int, ...]

    def __str__(self) -> str:
        text = [
            f"what rank {old} had is in the memory of the present rank {new}"
            for new, old in self.helpers
        ]
        text += [
            f"rank {new} has another state than the others" for new in self.differing
        ]
        return "; ".join([f"back to step {self.progress.step}", *text])


def newest_recovery(facts: Sequence[Facts]) -> Recovery | None:
    """Return the newest state that members of the next view (set of ranks) can restore from the copies that they hold.

    Returns None if there is no such state. ``facts``: for each member, by its rank in the next view, what it said in
    the agreement. The entry :data:`FACT` lists its copies.

    Ranks that held the same parts may have made copies that differ. The version that more than half of these ranks had
    is then taken. If no version has such a majority, the state counts as incomplete.
    """
    views: dict[int, dict[int, Facts]] = {}
    for rank, fact in enumerate(facts):
        for said in fact.get(FACT, ()):
            views.setdefault(said["epoch"], {})[rank] = said
    known = {
        (copy["step"], epoch): copy["progress"]
        for epoch, of_view in views.items()
        for said in of_view.values()
        for copy in said["copies"]
        if copy["step"] is not None
    }
    for step, epoch in sorted(known, reverse=True):
        if recovery := _recovery(
            epoch, step, Progress(**known[step, epoch]), views[epoch], len(facts)
        ):
            return recovery
    return None


def _recovery(
    epoch: int, step: int, progress: Progress, said: Mapping[int, Facts], world: int
) -> Recovery | None:
    """Return how members restore this step of view ``epoch``; None if they cannot. ``said``: facts of its members."""
    holders = next(iter(said.values()))["segments"]
    # by segment: new rank, owner, digest
    copies: dict[int, list[tuple[int, int, str]]] = {}
    for rank, facts in said.items():
        for copy in facts["copies"]:
            if copy["step"] in (step, None):
                for number, digest in copy["digests"].items():
                    copies.setdefault(int(number), []).append(
                        (rank, copy["owner"], digest)
                    )
    gives: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    helpers, differing = set[tuple[int, int]](), set[int]()
    for number in range(len(holders)):
        claims = {owner: digest for _, owner, digest in copies.get(number, ())}
        right, count = (Counter(claims.values()).most_common(1) or [("", 0)])[0]
        if count <= len(claims) / 2:
            return None
        own = [
            (rank, owner)
            for rank, owner, _ in copies[number]
            if said[rank]["rank"] == owner
        ]
        differing |= {rank for rank, owner in own if claims[owner] != right}
        able = [
            (rank, owner)
            for rank, owner, digest in sorted(copies[number])
            if digest == right
        ]
        first = [pair for pair in able if pair in own]
        for rank, owner in first or able[:1]:
            gives[rank].append((owner, number))
        helpers |= set() if first else set(able[:1])
    return Recovery(
        epoch,
        progress,
        tuple(map(tuple, gives)),
        tuple(sorted(helpers)),
        tuple(sorted(differing)),
    )


def restore(
    recovery: Recovery,
    snapshots: Sequence[Snapshots],
    state: State,
    group: dist.ProcessGroup | None = None,
    came: Iterable[tuple[str, Part]] = (),
) -> int:
    """Fill ``state``, whatever its layout, with the state of ``recovery``. Returns the bytes sent to other ranks.

    Collective over the ranks of ``group``, those of the new view. ``snapshots``: this rank's copies of earlier views;
    empty if it was in none. ``came``: tensors of the recovered state that this rank has received already, each with its
    name.
    """
    from weft.checkpoint.reshard import redistribute

    rank = dist.get_rank(group) if dist.is_initialized() else 0
    sent = redistribute(
        [*parts_to_give(recovery, snapshots, rank), *came], state.tensors(), group
    )
    state.updates = recovery.progress.updates
    return sent


def parts_to_give(
    recovery: Recovery, snapshots: Sequence[Snapshots], rank: int
) -> Iterator[tuple[str, Part]]:
    """Yield the name and the values of each part of a tensor that this rank sends to the other ranks.

    ``recovery``: the state to restore; ``snapshots``: this rank's copies of earlier views; ``rank``: its rank in the
    new view.
    """
    for copies in snapshots:
        if copies.epoch == recovery.epoch:
            for owner, number in recovery.gives[rank]:
                yield from copies.parts(recovery.progress.step, owner, number)
