"""What remains of the network's bandwidth when flows share the uplinks of a fat tree, by how they choose their path.

A switch at the lowest level of a fat tree has as many uplinks as devices below it, or fewer (oversubscription). Routers
that hash a flow to one uplink (ECMP) put several on some and none on others, and a collective waits for the fullest.
Flows that are split into several, each hashed by itself, even this out; routers that spray packets over all uplinks
leave no collisions (Gangidi et al. 2024, SIGCOMM; Insights into DeepSeek-V3, 2505.09343, section 5).
"""

from functools import cache
from math import comb

#: How flows choose an uplink.
ROUTING = ("multipath", "split", "single")
#: Parts into which a split flow is cut, as many as queue pairs that collective libraries open.
PARTS = 4


@cache
def fullest_link(flows: int, links: int) -> float:
    """Return the mean number of flows on the fullest of ``links`` links, if each of ``flows`` flows (data streams) is
    hashed to one of them at random.

    The result is exact: for each ``m``, the probability that no link has more than ``m`` flows is computed.
    """
    mean, before = 0.0, 0.0
    for most in range(flows + 1):
        ways = [1.0] + [0.0] * flows  # shares of placements, link by link
        for link in range(1, links + 1):
            part = 1 / link
            ways = [
                sum(
                    ways[placed - here]
                    * comb(placed, here)
                    * part**here
                    * (1 - part) ** (placed - here)
                    for here in range(min(most, placed) + 1)
                )
                for placed in range(flows + 1)
            ]
        mean += most * (ways[flows] - before)
        before = ways[flows]
        if before > 1 - 1e-9:
            break
    return mean


def uplink_share(flows: int, uplinks: int, routing: str) -> float:
    """Return the share of the devices' bandwidth that collectives across switches reach.

    ``flows``: devices below a switch, each of which sends one flow at a time. ``uplinks``: uplinks of the switch, each
    as fast as a device's link. ``routing``: how flows choose their uplink, one of :data:`ROUTING`.
    """
    even = flows / uplinks
    if routing == "multipath":
        fullest = even
    elif routing == "split":
        fullest = fullest_link(flows * PARTS, uplinks) / PARTS
    else:
        fullest = fullest_link(flows, uplinks)
    return 1 / max(1.0, fullest)
