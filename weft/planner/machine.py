"""The machine under a layout: devices, their memory, and the links between them, level by level."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from weft.errors import UsageError, WeftError, nearest
from weft.recipe.toml import read_toml
from weft.section import Section, validated
from weft.shapes.shape import Num

#: Share of the 4-bit peak that a large product reaches.
LEAST = 0.47
#: What nobody tells of the links of a cluster: microseconds, devices, GB/s.
ONE_SITE = {
    "link_latency": 25.0,
    "network_latency": 12.0,
    "site": 1e9,
    "between": 1e3,
    "between_latency": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Figures of one device and of its share of a host. Memory is in GB, bandwidths are in GB/s per direction.

    In a :class:`Machine` they are in bytes and bytes/s.

    Attributes:
        ``memory``, ``hbm``: the device's memory and its bandwidth.
        ``link``: bandwidth of the fast links among devices; ``domain``: number of devices that these links join.
        ``network``: the device's share of the bandwidth of its node's network.
        ``host``: bandwidth of the link between device and host (PCIe 3, 4, 5: 12, 25, 55; NVLink-C2C 450).
        ``host_memory``: the device's share of the host's memory; 0: the device is the host.
        ``host_bandwidth``: the device's share of the bandwidth of the host's memory.
        ``disk_read``, ``disk_write``: the device's share of the bandwidths at which the disk is read and written.
        ``disk_bytes``: the device's share of the free space on the disk; 0: nothing rests in files.
        ``fast``: fast memory of one multiprocessor in KB, from which attention takes its blocks.
    """

    memory: Num
    hbm: Num
    link: Num
    network: Num
    domain: Num = 8
    host: Num = 55
    host_memory: Num = 256
    host_bandwidth: Num = 77
    disk_read: Num = 3
    disk_write: Num = 2
    disk_bytes: Num = 1000
    fast: Num = 227


@dataclass(frozen=True)
class Device(Hardware):
    """Data-sheet figures of one device.

    ``name``: name of the device. ``bf16``, ``fp8``, ``fp4``: peak rates in TFLOP/s of matrix products in these formats,
    without sparsity; ``fp32``: the same in float32, 0 if it is half of ``bf16`` (as TF32). ``clock``: share of the
    16-bit peak that a large product reaches, because of power and clock limits. ``low``: the same share for 8 bits;
    that for 4 bits is :data:`LEAST`. ``clock`` and ``low`` come from measurements of published runs
    (docs/explanations/planner.md). ``fused``: share of the 16-bit peak that forward and backward of fused attention
    reach over long sequences with heads of width 128, from measurements of kernels (Dao
    2023, 2307.08691, figures 4 and 7).
    """

    name: str
    bf16: float
    fp8: float
    fp4: float
    fp32: float = 0.0
    clock: float = 0.76
    low: float = 0.76
    fused: float = 0.4


_KNOWN = read_toml(Path(__file__).with_name("devices.toml"))
DEVICES = {name: Device(name, **fields) for name, fields in _KNOWN["devices"].items()}
#: Clusters by name, for ``--cluster``; the count comes from ``--gpus``.
CLUSTERS: dict[str, dict[str, Any]] = _KNOWN["clusters"]


def find_device(text: str, memory: float | None = None) -> Device:
    """Return the device preset that ``text`` names (``A100-SXM-80GB``, ``h100``).

    ``memory``: memory in GB, which chooses among several presets of that name. Raises :class:`UsageError` for an
    unknown name.
    """
    words = text.upper().replace("_", "-")
    if words.upper() in {name.upper() for name in DEVICES}:
        return next(d for name, d in DEVICES.items() if name.upper() == words)
    order = sorted(DEVICES.values(), key=lambda d: -len(d.name.partition("-")[0]))
    family = next(
        (
            d.name.partition("-")[0]
            for d in order
            if d.name.upper().partition("-")[0] in words
        ),
        None,
    )
    if family is None:
        raise UsageError(f"device = {text!r} is not known; {nearest(text, DEVICES)}")
    fits = [d for d in DEVICES.values() if d.name.partition("-")[0] == family]
    fits = [d for d in fits if ("PCIE" in d.name.upper()) == ("PCIE" in words)] or fits
    said = [d for d in fits if d.name.rpartition("-")[2].upper() in words]
    if said:
        return said[0]
    return nearest_memory(fits, memory or 80)


def nearest_memory(devices: Sequence[Device], memory: float) -> Device:
    """Return the device whose memory is nearest to ``memory`` GB; of several, the fastest."""
    return min(devices, key=lambda d: (abs(d.memory - memory), -d.bf16))


class Group(Section):
    """Devices of one kind with network cards of one kind, which are a part of a mixed cluster."""

    device: str = Field(description="Name of the devices' preset, such as A100-80GB.")
    count: PositiveInt = Field(description="Number of devices in the group.")
    network: PositiveFloat | None = Field(
        None,
        description=(
            "Bandwidth of the network inside the group, in GB/s per device and direction. If not set, the "
            "preset of the device gives it."
        ),
    )
    memory: PositiveFloat | None = Field(
        None,
        description="Memory of a device in GB. If not set, the preset of the device gives it.",
    )
    link: PositiveFloat | None = Field(
        None,
        description=(
            "Bandwidth of the fast links inside a node of the group, in GB/s per device and direction. If not set, "
            "that of the cluster, or of the preset of the device."
        ),
    )
    per_node: PositiveInt | None = Field(
        None,
        description="Number of devices of a node of the group. If not set, that of the cluster.",
    )
    card: Literal["infiniband", "roce", "ethernet"] | None = Field(
        None,
        description=(
            "Kind of the group's network cards. Cards of two kinds, and Ethernet without RDMA, talk TCP, which "
            "reaches 94 % of the bandwidth. If not set, the share that the program reaches counts."
        ),
    )
    name: str = Field(
        "",
        description="Name of the group in tables. If not set, it is the name of the group's devices.",
    )

    @property
    def title(self) -> str:
        return self.name or self.device


class Cluster(Section):
    """Description of a cluster, as a cluster file has it. Values that are left out come from the preset of ``device``.

    Attributes:
        ``device``: name of the device; ``count``: number of devices; ``per_node``: number of devices of a node.
        ``domain``: number of devices that the fast links join, by default ``per_node``.
        ``memory``: memory of a device in GB.
        ``bf16``, ``fp8``: peak rates in TFLOP/s of matrix products in these formats.
        ``hbm``, ``link``, ``network``: bandwidths of device memory, fast links and network, in GB/s per device and
            direction.
        ``slowest_network``: bandwidth of the slowest NIC, if they differ; a collective is as fast as its slowest
            member.
        ``link_latency``: microseconds to start a collective or a message over the fast links, however many take part.
        ``network_latency``: microseconds of a message over the network.
        ``host``: bandwidth of the link between a device and its host, in GB/s per direction.
        ``host_memory``: a device's share of the host's memory in GB; 0: the device is the host.
        ``host_bandwidth``: a device's share of the bandwidth of the host's memory, in GB/s.
        ``disk_read``, ``disk_write``: a device's share of the disk's bandwidths, in GB/s.
        ``disk_bytes``: a device's share of the free space on the disk, in GB; 0: nothing is kept in files.
        ``site``: number of devices of one site, if there are several sites.
        ``between``: bandwidth between sites, in GB/s per device.
        ``between_latency``: microseconds of a message between sites, one way.
        ``groups``: devices of several kinds, or with network cards of several kinds; ``device`` and ``count`` then
            follow from them.
        ``across``: bandwidth between groups, in GB/s per device.
        ``leaf``: devices below one switch of a fat tree; ``uplinks``: the switch's uplinks, by default as many.
        ``routing``: how flows choose an uplink: ``multipath`` (packets are sprayed over all), ``split`` (a flow in four
            parts, each hashed to an uplink) or ``single`` (a flow is hashed to one uplink).
        ``links``: measured bandwidth between any two nodes, in GB/s, a row for each node.
        ``calibration``: curves that ``weft probe`` has measured.
    """

    device: str
    count: PositiveInt
    per_node: PositiveInt = 8
    domain: PositiveInt | None = None
    memory: PositiveFloat | None = None
    bf16: PositiveFloat | None = None
    fp8: PositiveFloat | None = None
    hbm: PositiveFloat | None = None
    link: PositiveFloat | None = None
    network: PositiveFloat | None = None
    slowest_network: PositiveFloat | None = None
    link_latency: PositiveFloat = 25.0
    network_latency: PositiveFloat = 12.0
    host: PositiveFloat | None = None
    host_memory: float | None = Field(None, ge=0)
    host_bandwidth: PositiveFloat | None = None
    disk_read: PositiveFloat | None = None
    disk_write: PositiveFloat | None = None
    disk_bytes: float | None = Field(None, ge=0)
    site: PositiveInt | None = None
    between: PositiveFloat | None = None
    between_latency: PositiveFloat = Field(
        5000.0, description="Microseconds that a message between sites takes, one way."
    )
    groups: tuple[Group, ...] = ()
    across: PositiveFloat | None = None
    leaf: PositiveInt | None = Field(None, le=64)
    uplinks: PositiveInt | None = Field(None, le=64)
    routing: Literal["multipath", "split", "single"] = "multipath"
    links: tuple[tuple[float, ...], ...] = ()
    calibration: dict[str, Any] = Field(
        {}, description="Curves that weft probe has measured."
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.site is None) != (self.between is None):
            missing = "between" if self.between is None else "site"
            raise ValueError(
                f"{missing} is missing: several sites need 'site' (devices of one) and 'between' (GB/s)"
            )
        if (
            self.slowest_network
            and self.network
            and self.slowest_network > self.network
        ):
            raise ValueError("slowest_network is larger than network")
        find_device(self.device, self.memory)
        windows = self.calibration.get("windows", [])
        if not isinstance(windows, list) or not all(
            isinstance(row, list)
            and len(row) == 4
            and all(isinstance(x, int | float) and 0 < x < math.inf for x in row)
            for row in windows
        ):
            raise ValueError(
                "calibration.windows is no table with four positive numbers in each row; leave it out, or let "
                "weft probe --watch write it"
            )
        if not self.leaf and (self.uplinks or self.routing != "multipath"):
            raise ValueError(
                "leaf is missing: uplinks and routing are those of a switch with 'leaf' devices below it"
            )
        if bool(self.groups) != bool(self.across):
            missing = "across" if self.groups else "groups"
            raise ValueError(
                f"{missing} is missing: a mixed cluster needs [[groups]] and 'across' (GB/s per device between them)"
            )
        for group in self.groups:
            if group.per_node and group.count % group.per_node:
                raise ValueError(
                    f"group {group.title!r} has {group.count} devices, which is no multiple of its per_node = "
                    f"{group.per_node}"
                )
        return self

    @property
    def probed(self) -> bool:
        """Whether the cluster file has curves that ``weft probe`` has measured."""
        return bool(self.calibration.get("settings"))

    def machine(self, bits: Num = 16) -> "Machine":
        """Return the figures that the cost model reads, in SI units, for matrix products of ``bits`` bits."""
        given = self.model_dump(
            exclude={"device", "count", "per_node", "slowest_network", "calibration", "groups", "across", "links",
                     "leaf", "uplinks", "routing"}
        )  # fmt: skip
        given["network"] = self.slowest_network or self.network
        given["domain"] = self.domain or (self.per_node if self.per_node != 8 else None)
        machine = machine_of(find_device(self.device, self.memory), bits, **given)
        return replace(machine, network=machine.network * self.tree_share)

    @property
    def tree_share(self) -> float:
        """Share of the network's bandwidth, from 0 to 1, that is left if flows share the uplinks of a fat tree."""
        if not self.leaf or self.count <= self.leaf:
            return 1.0
        from weft.planner.fat_tree import uplink_share

        return uplink_share(self.leaf, self.uplinks or self.leaf, self.routing)


def load_cluster(name: str, count: int | None = None) -> Cluster:
    """Load the description of a cluster. ``name``: a preset of :data:`CLUSTERS`, or the path of a TOML file with the
    fields of :class:`Cluster`.

    ``count``: number of devices, in place of the number in the preset or file.
    """
    if name.lower() in CLUSTERS:
        tree = dict(CLUSTERS[name.lower()])
        if count is None:
            raise UsageError(
                f"cluster {name!r} is a preset without a size; give --gpus"
            )
    elif not Path(name).is_file():
        raise WeftError(
            f"cluster {name!r} is neither a file nor a preset; {nearest(name, CLUSTERS)}"
        )
    else:
        tree = read_toml(Path(name))
    return validated_cluster(tree, name, count)


def validated_cluster(
    tree: dict[str, Any], name: str, count: int | None = None
) -> Cluster:
    """Return the cluster with the fields of ``tree``, those of a cluster file.

    ``name``: what error messages call it. ``count``: number of devices, in place of the number in ``tree``.
    """
    if tree.get("groups"):
        tree = _of_groups(tree, name, count)
    if count is not None:
        tree["count"] = count
    for field, hint in {
        "device": f"one of: {', '.join(DEVICES)}",
        "count": "e.g. count = 64",
    }.items():
        if field not in tree:
            raise UsageError(
                f"{name}: {field} is missing; {hint} (or use a preset: {', '.join(CLUSTERS)})"
            )
    return validated(Cluster, tree, name)


def _of_groups(tree: dict[str, Any], name: str, count: int | None) -> dict[str, Any]:
    """Return the fields of a mixed cluster with ``device``, ``count``, ``memory`` and ``network`` of its weakest part.

    What spans all groups in lockstep, such as data parallelism over them, is as fast as the slowest device and link.
    """
    if both := [key for key in ("device", "count", "memory", "network") if key in tree]:
        raise UsageError(
            f"{name}: {both[0]} stands beside [[groups]]; write it in each group"
        )
    if not isinstance(tree["groups"], list):
        raise UsageError(
            f"{name}: groups is no list; write [[groups]] above the device and count of each"
        )
    groups = [validated(Group, group, f"{name}: groups") for group in tree["groups"]]
    total = sum(group.count for group in groups)
    if count not in (None, total):
        raise UsageError(
            f"{name} has {total} devices in groups; leave --gpus out, or write other groups"
        )
    devices = [find_device(group.device, group.memory) for group in groups]
    weakest = min(devices, key=lambda device: device.bf16 * device.clock)
    networks = [
        group.network or device.network
        for group, device in zip(groups, devices, strict=True)
    ]
    memory = min(
        group.memory or device.memory
        for group, device in zip(groups, devices, strict=True)
    )
    slowest = min(float(speed) for speed in networks)
    if isinstance(across := tree.get("across"), int | float) and across > 0:
        slowest = min(slowest, across)  # anything else is refused with the other fields
    return tree | {"device": weakest.name, "count": total, "memory": memory, "network": slowest}  # fmt: skip


@dataclass(frozen=True)
class Machine(Hardware):
    """Figures of a cluster in SI units (flop/s, bytes, bytes/s, seconds), as the cost model reads them.

    Each may be an array.

    Attributes:
        ``peak``: peak rate of matrix products in the chosen precision.
        ``peak16``: peak rate in 16 bits, which attention uses; twice that in float32 for products in float32.
        ``clock``: share of ``peak`` that a large product reaches.
        ``fused``: share of ``peak16`` that fused attention reaches over long sequences.
        ``link_latency``, ``network_latency``: seconds to start a collective over fast links, and of a message over the
            network.
        ``site``: number of devices of one site.
        ``between``, ``between_latency``: bandwidth of a device between sites, and latency of a message between sites.
    """

    peak: Num
    peak16: Num
    clock: Num
    fused: Num
    link_latency: Num
    network_latency: Num
    site: Num
    between: Num
    between_latency: Num


#: SI units in what devices and clusters tell of a machine.
SI = dict.fromkeys((field.name for field in fields(Hardware)), 1e9) | {
    "domain": 1, "fast": 1e3, "link_latency": 1e-6, "network_latency": 1e-6, "site": 1, "between": 1e9,
    "between_latency": 1e-6,
}  # fmt: skip


def machine_of(device: Device, bits: int = 16, **given: Any) -> Machine:
    """Return the :class:`Machine` of a device preset, for matrix products of ``bits`` bits.

    ``given``: values that replace those of the preset unless they are None, in the units of :class:`Cluster`.
    """
    given = {name: value for name, value in given.items() if value is not None}
    bf16 = given.pop("bf16", device.bf16)
    scale = bf16 / device.bf16
    peaks = {
        32: (device.fp32 or device.bf16 / 2) * scale,
        16: bf16,
        8: given.pop("fp8", device.fp8 * scale),
        4: device.fp4 * scale,
    }
    clocks = {32: device.clock, 16: device.clock, 8: device.low, 4: LEAST}
    if device.fp8 == device.bf16:  # no 8-bit units: nothing is gained
        clocks = dict.fromkeys(clocks, device.clock)
    numbers = (
        ONE_SITE
        | {field.name: getattr(device, field.name) for field in fields(device)}
        | given
    )
    # attention in float32 has no 16-bit products
    peak16 = 2 * peaks[32] if bits == 32 else bf16
    return Machine(
        1e12 * peaks[bits],
        1e12 * peak16,
        clocks[bits],
        device.fused,
        **{n: SI[n] * numbers[n] for n in SI},
    )


def local_cluster(device: str, memory: float, world: int, per_node: int) -> Cluster:
    """Return a cluster of ``world`` devices, ``per_node`` on each node, with ``memory`` bytes each.

    ``device``: the name of the device. For an unknown name, the GPU preset with the nearest memory is used; of several,
    the fastest.
    """
    try:
        name = find_device(device, memory / 1e9).name
    except UsageError:
        gpus = [d for d in DEVICES.values() if d.name != "CPU"]
        name = nearest_memory(gpus, memory / 1e9).name
    return Cluster(
        device=name,
        count=world,
        per_node=per_node,
        domain=per_node,
        memory=memory / 1e9,
    )
