"""Rules of dispatchers by node: what they cannot be combined with."""

from weft.refusal import Rule

#: Both ways by node need nodes of equally many ranks.
NODES = Rule(
    "two levels without nodes",
    "layout",
    lambda a: a.layout.ep > 1 and not a.ranks_in_node,
    "dispatch = {0.layout.dispatch!r} needs equally many of the ranks of ep = {0.layout.ep} on every node, and "
    "layout.node = {0.layout.node} ranks share one (0: not said)",
    "set layout.node, or dispatch = 'per-rank'",
)
