"""Groups of a mixed cluster: their nodes, the figures of their devices and links, and how fast they compute."""

from dataclasses import dataclass

from weft.planner.cost import MicrobatchSeconds, Plan, passes
from weft.planner.engine_constants import EngineConstants
from weft.planner.layout_search import at
from weft.planner.machine import Cluster, Group, Machine, find_device, machine_of
from weft.shapes.shape import Shape

#: Share of an Ethernet card's bandwidth that TCP reaches: 1,448 bytes of payload in 1,538 on the wire.
TCP = 0.94


@dataclass(frozen=True)
class GroupSpeed:
    """Speed of a group of equal devices in a mixed cluster.

    ``group``: the group's description. ``machine``: figures of its devices and links. ``times``: seconds of the parts
    of a microbatch on these devices.
    """

    group: Group
    machine: Machine
    times: MicrobatchSeconds


def node_size(cluster: Cluster, group: Group) -> int:
    """Return the number of devices per node in ``group``; if the group does not state it, that of ``cluster``."""
    return group.per_node or cluster.per_node


def nodes_by_group(cluster: Cluster) -> list[int]:
    """Return for each node of a mixed cluster the index of its group. Nodes are numbered group by group."""
    return [
        index
        for index, group in enumerate(cluster.groups)
        for _ in range(-(-group.count // node_size(cluster, group)))
    ]


def network_share(engine: EngineConstants, source: Group, target: Group) -> float:
    """Return the share of the network's nominal bandwidth, from 0 to 1, that transfers between two groups reach.

    ``source``, ``target``: the groups; twice the same group for transfers inside it. ``engine``: constants of the
    training program, among them this share for networks other than Ethernet.
    """
    if source.card and (source.card != target.card or source.card == "ethernet"):
        return TCP
    return float(engine.network)


def machine_of_group(cluster: Cluster, group: Group, bits: int) -> Machine:
    """Return the figures of the devices and links of one ``group`` of a mixed ``cluster``, as the cost model reads
    them.

    What the group does not state is that of the cluster for links, latencies and the fast domain, and that of the
    device's preset for memory and network. The network is that inside the group, less what a fat tree shares.
    ``bits``: width of the operands of matrix products.
    """
    device = find_device(group.device, group.memory)
    network = (group.network or float(device.network)) * cluster.tree_share
    link = group.link or cluster.link
    own = {"memory": group.memory, "network": network, "link": link}
    node = node_size(cluster, group)
    domain = cluster.domain or (node if node != 8 else None)
    latency = {
        "link_latency": cluster.link_latency,
        "network_latency": cluster.network_latency,
    }
    return machine_of(device, bits, domain=domain, **own, **latency)


def group_speeds(
    shape: Shape, engine: EngineConstants, cluster: Cluster, plan: Plan
) -> list[GroupSpeed]:
    """Return the speed of every group of ``cluster`` under the layout ``plan``, in the order of the groups.

    ``shape``: the model. ``engine``: constants of the training program.
    """
    machines = [
        machine_of_group(cluster, group, int(plan.bits)) for group in cluster.groups
    ]
    return [
        GroupSpeed(group, machine, at(passes(shape, machine, plan, engine), 0))
        for group, machine in zip(cluster.groups, machines, strict=True)
    ]
