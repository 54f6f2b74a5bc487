"""Process groups that outlive a view of a run, because none of their ranks is lost.

PyTorch destroys all groups with the default group, and a new view needs a new default group. A group whose members all
go on is therefore taken out of PyTorch's tables before, and put back under the members' new ranks. Its connections stay
(ElasWave, 2025, edits communicators in place). Before a group is used again its members compare how many collectives
each has begun in it. A group in which the numbers differ, or whose connections were shut, is made anew by all.

The tables are private to PyTorch, which can split and shrink groups of NCCL alone. Groups of NCCL are not kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from weft.net.groups import new_group
from weft.net.hangup import connections_now

c10d = dist.distributed_c10d


@dataclass(frozen=True)
class GroupKey:
    """Identity of a process group that stays the same from view to view.

    ``name``: name of the group; ``members``: its members by their numbers in the run, in rank order.
    """

    name: str
    members: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {' '.join(map(str, self.members))}"


@dataclass
class KeptGroup:
    """A process group of this rank that a later view (set of members) can use again.

    Attributes:
        ``group``: the group itself.
        ``connections``: its connections, by inode.
        ``entries``: entries of the group in PyTorch's tables, by the table's name, while the group is out of use.
    """

    group: dist.ProcessGroup
    connections: set[int]
    entries: dict[str, Any] = field(default_factory=dict)


class KeptGroups:
    """Keeps the process groups of this rank, so that a later view with the same members can use them again.

    The default group of a view is not kept.

    Attributes:
        ``members``: numbers of the members of the present view, in the order of their ranks.
        ``created``, ``reused``: keys of the groups made in the present view, and of those from earlier views.
    """

    #: PyTorch's tables with an entry for each group.
    TABLES = ("pg_map", "pg_names", "pg_backend_config", "pg_to_tag")
    #: Groups in which single messages travel, which nothing counts.
    MESSAGES = ("mesh_pp",)

    def __init__(self) -> None:
        self.members: Sequence[int] = ()
        self.created: list[GroupKey] = []
        self.reused: list[GroupKey] = []
        self._epoch = 0
        self._kept: dict[GroupKey, KeptGroup] = {}
        self._usable: set[GroupKey] = set()

    def group(self, ranks: Sequence[int], name: str) -> dist.ProcessGroup:
        """Return the process group of the world ranks ``ranks``, which include this rank: a kept one, or else a new
        one.

        Exactly these ranks must call this function. ``name``: tells the group from others of the same ranks.
        """
        key = GroupKey(name, tuple(self.members[rank] for rank in sorted(ranks)))
        if key in self._usable:
            self.reused.append(key)
            return self._kept[key].group
        before = connections_now()
        group = new_group(ranks, name, f"{key} {self._epoch}")
        self._kept[key] = KeptGroup(group, connections_now() - before)
        self._usable.add(key)
        self.created.append(key)
        return group

    def connections(self, lost: Collection[int] = ()) -> set[int]:
        """Return the connections of all kept groups that have none of the members ``lost``, by inode.

        A connection's inode is the number by which :class:`weft.net.hangup.HangUp` knows it.
        """
        return {
            inode
            for key, kept in self._kept.items()
            if not set(lost) & set(key.members)
            for inode in kept.connections
        }

    def set_aside(self, lost: Collection[int], broken: bool) -> None:
        """Destroy the default group and the groups that have lost a member; take all other groups out of use.

        ``lost``: numbers of the lost members. ``broken``: whether the connections of all groups were shut, so that
        none can be kept.
        """
        gone = [
            key
            for key in self._kept
            if set(lost) & set(key.members)
            or (len(key.members) > 1 and (broken or key.name in self.MESSAGES))
        ]
        for key in gone:
            dist.destroy_process_group(self._kept.pop(key).group)
        for kept in self._kept.values():
            tables = {name: getattr(c10d._world, name) for name in self.TABLES}
            kept.entries = {
                name: table.pop(kept.group) for name, table in tables.items()
            }
            c10d._world.pg_group_ranks.pop(kept.group)
        dist.destroy_process_group()
        self._usable, self.created, self.reused = set(), [], []

    def facts(self) -> dict[str, int]:
        """Return how many collectives this rank has begun in each group that it has set aside, by the group's key."""
        return {
            # which PyTorch's own description of the class leaves out
            str(key): kept.group._get_sequence_number_for_group()  # type: ignore[attr-defined]
            for key, kept in self._kept.items()
        }

    def enter(
        self, epoch: int, members: Sequence[int], facts: Mapping[int, dict[str, int]]
    ) -> None:
        """Make kept groups usable in a new view, whose default group exists already.

        A kept group is used if all its members are in the view, and have begun equally many collectives in it;
        otherwise it is destroyed. ``epoch``: number of the view. ``members``: numbers of its members, by rank.
        ``facts``: what each member has said (:meth:`facts`), by its number.
        """
        self._epoch, self.members = epoch, members
        rank_of = {number: rank for rank, number in enumerate(members)}
        for key, kept in list(self._kept.items()):
            said = [facts.get(number, {}).get(str(key)) for number in key.members]
            if None in said or len(set(said)) > 1 or not {*key.members} <= {*members}:
                self._kept.pop(key).group.shutdown()
                continue
            for name, entry in kept.entries.items():
                getattr(c10d._world, name)[kept.group] = entry
            ranks = [rank_of[number] for number in key.members]
            # under new ranks, in the same order within the group
            numbered = {rank: index for index, rank in enumerate(ranks)}
            c10d._world.pg_group_ranks[kept.group] = numbered
            c10d._world.tags_to_pg.setdefault(kept.entries["pg_to_tag"], []).append(
                kept.group
            )
            c10d._register_process_group(kept.group.group_name, kept.group)
            self._usable.add(key)
