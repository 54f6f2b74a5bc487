"""What a layout runs on: devices, their memory, and the links between them, level by level."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from weft.errors import UsageError, WeftError, nearest
from weft.model_shape import Num
from weft.recipe import Section, explain

#: Share of the 4-bit peak that a large product reaches.
LEAST = 0.47


@dataclass(frozen=True)
class Device:
    """Data-sheet figures of one device: dense peaks in TFLOP/s, memory in GB, bandwidths in GB/s per direction.

    ``domain``: how many devices the fast links join; ``network``: share of the node's network of one device.
    ``clock``: share of the 16-bit peak that a large product reaches (power and clock limits), ``low``: the same for
    8 bits (4 bits: :data:`LEAST`). Measured: pooled over published runs (docs/planner.md).

    Of the host, each device's share: ``host``, the link to it per direction (PCIe 3, 4, 5: 12, 25, 55; NVLink-C2C 450),
    ``host_memory`` in GB (0: the device is the host) and ``host_bandwidth``, that of its memory.
    """

    name: str
    bf16: float
    fp8: float
    fp4: float
    memory: float
    hbm: float
    link: float
    network: float
    domain: int = 8
    clock: float = 0.76
    low: float = 0.76
    host: float = 55
    host_memory: float = 256
    host_bandwidth: float = 77


def _devices(*devices: Device) -> dict[str, Device]:
    return {device.name: device for device in devices}


#: Presets; from the makers' data sheets, without sparsity. A device without 8-bit units has its 16-bit peak there.
DEVICES: dict[str, Device] = _devices(
    Device("CPU", 0.05, 0.05, 0.05, 16, 20, 5, 1, 1, 0.7, 0.7, host=20, host_memory=0, host_bandwidth=20),
    Device("V100", 125, 125, 125, 32, 900, 150, 12.5, 8, 0.6, host=12, host_memory=96, host_bandwidth=32),
    Device("A100-40GB", 312, 312, 312, 40, 1555, 300, 25, host=25, host_memory=128, host_bandwidth=51),
    Device("A100-80GB", 312, 312, 312, 80, 2039, 300, 25, host=25, host_bandwidth=51),
    Device("A800-80GB", 312, 312, 312, 80, 2039, 200, 25, host=25, host_bandwidth=51),
    Device("L40S", 362, 733, 733, 48, 864, 32, 25, host=25, host_memory=128),
    Device("RTX 4090", 165, 330, 330, 24, 1008, 32, 3, host=25, host_memory=64, host_bandwidth=40),
    Device("H100-80GB", 989, 1979, 1979, 80, 3350, 450, 50, 8, 0.88, 0.84),
    Device("H100-96GB", 989, 1979, 1979, 96, 2400, 450, 50, 8, 0.66, 0.63),
    Device("H100-PCIe", 756, 1513, 1513, 80, 2000, 64, 25),
    Device("H800-80GB", 989, 1979, 1979, 80, 3350, 200, 50, 8, 0.88, 0.84),
    Device("H20-96GB", 148, 296, 296, 96, 4000, 450, 50),
    Device("H200-141GB", 989, 1979, 1979, 141, 4800, 450, 50, 8, 0.88, 0.84),
    Device("B200-180GB", 2250, 4500, 9000, 180, 8000, 900, 50, 8, 0.64, 0.64, host_bandwidth=90),
    Device("B300-270GB", 2250, 4500, 13500, 270, 8000, 900, 100, 8, 0.64, 0.64, host_bandwidth=90),
    Device("GB200-186GB", 2450, 4900, 9800, 186, 8000, 900, 50, 72, 0.6, 0.56,
           host=450, host_memory=240, host_bandwidth=250),
    Device("GB300-288GB", 2450, 4900, 14700, 288, 8000, 900, 100, 72, 0.62, 0.6,
           host=450, host_memory=240, host_bandwidth=250),
    Device("MI250X", 383, 383, 383, 128, 3277, 100, 25, host=72, host_memory=128, host_bandwidth=51),
    Device("MI300X", 1307, 2615, 2615, 192, 5300, 448, 50),
    Device("MI355X", 2300, 4600, 9200, 288, 8000, 538, 50, host_bandwidth=90),
)  # fmt: skip


def find_device(text: str, memory: float | None = None) -> Device:
    """The preset that ``text`` names (``A100-SXM-80GB``, ``h100``), the one with ``memory`` GB if several fit."""
    words = text.upper().replace("_", "-")
    if words.upper() in {name.upper() for name in DEVICES}:
        return next(d for name, d in DEVICES.items() if name.upper() == words)
    order = sorted(DEVICES.values(), key=lambda d: -len(d.name.partition("-")[0]))
    family = next((d.name.partition("-")[0] for d in order if d.name.upper().partition("-")[0] in words), None)
    if family is None:
        raise UsageError(f"device = {text!r} is not known; {nearest(text, DEVICES)}")
    fits = [d for d in DEVICES.values() if d.name.partition("-")[0] == family]
    fits = [d for d in fits if ("PCIE" in d.name.upper()) == ("PCIE" in words)] or fits
    said = [d for d in fits if d.name.rpartition("-")[2].upper() in words]
    if said:
        return said[0]
    return min(fits, key=lambda d: abs(d.memory - (memory or 80)))


class Cluster(Section):
    """A cluster in about eight numbers; what is left out comes from the preset of ``device``.

    Units: memory in GB, ``hbm``, ``link`` and ``network`` in GB/s per device and direction, latencies in
    microseconds, peaks in TFLOP/s. ``domain``: devices that the fast links join (``per_node`` if left out).
    ``site``: devices of one site, with ``between`` GB/s per device among the sites. ``slowest_network``: the
    slowest NIC, if they differ: a collective is as fast as its slowest member. ``host``, ``host_memory`` and
    ``host_bandwidth``: each device's share of its host, for offloading; no ``host_memory``, 0, rules that out.
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
    link_latency: PositiveFloat = 4.0
    network_latency: PositiveFloat = 12.0
    host: PositiveFloat | None = None
    host_memory: float | None = Field(None, ge=0)
    host_bandwidth: PositiveFloat | None = None
    site: PositiveInt | None = None
    between: PositiveFloat | None = None
    between_latency: PositiveFloat = Field(5000.0, description="microseconds, one way")
    calibration: dict[str, Any] = Field({}, description="measured curves, from weft probe")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.site is None) != (self.between is None):
            missing = "between" if self.between is None else "site"
            raise ValueError(f"{missing} is missing: several sites need 'site' (devices of one) and 'between' (GB/s)")
        if self.slowest_network and self.network and self.slowest_network > self.network:
            raise ValueError("slowest_network is larger than network")
        find_device(self.device, self.memory)
        return self

    @property
    def probed(self) -> bool:
        """Whether ``weft probe`` has measured it."""
        return bool(self.calibration.get("settings"))

    def machine(self, bits: Num = 16) -> "Machine":
        """The numbers that the cost model reads, for products of so many ``bits``."""
        return machine_of(
            find_device(self.device, self.memory),
            bits,
            memory=self.memory,
            bf16=self.bf16,
            fp8=self.fp8,
            hbm=self.hbm,
            link=self.link,
            network=self.slowest_network or self.network,
            domain=self.domain or (self.per_node if self.per_node != 8 else None),
            link_latency=self.link_latency,
            network_latency=self.network_latency,
            host=self.host,
            host_memory=self.host_memory,
            host_bandwidth=self.host_bandwidth,
            site=self.site,
            between=self.between,
            between_latency=self.between_latency,
        )


#: Clusters by name, for ``--cluster``; the count comes from ``--gpus``.
CLUSTERS: dict[str, dict[str, Any]] = {
    "a100": {"device": "A100-80GB"},
    "a100-40": {"device": "A100-40GB"},
    "h100": {"device": "H100-80GB"},
    "h200": {"device": "H200-141GB"},
    "b200": {"device": "B200-180GB"},
    "gb200": {"device": "GB200-186GB", "per_node": 4, "domain": 72},
    "gb300": {"device": "GB300-288GB", "per_node": 4, "domain": 72},
    "mi300x": {"device": "MI300X"},
    "cpu": {"device": "CPU", "per_node": 1},
}


def load_cluster(name: str, count: int | None = None) -> Cluster:
    """A preset of :data:`CLUSTERS`, or a TOML file with the fields of :class:`Cluster`."""
    if name.lower() in CLUSTERS:
        tree = dict(CLUSTERS[name.lower()])
        if count is None:
            raise UsageError(f"cluster {name!r} is a preset without a size; give --gpus")
    elif not Path(name).is_file():
        raise WeftError(f"cluster {name!r} is neither a file nor a preset; {nearest(name, CLUSTERS)}")
    else:
        try:
            tree = tomllib.loads(Path(name).read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{name} is not valid TOML: {error}") from None
    if count is not None:
        tree["count"] = count
    try:
        return Cluster.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "missing":
            field = first["loc"][0]
            hint = "e.g. count = 64" if field == "count" else f"one of: {', '.join(DEVICES)}"
            raise UsageError(f"{name}: {field} is missing; {hint} (or use a preset: {', '.join(CLUSTERS)})") from None
        raise UsageError(f"{name}: {explain(error, Cluster)}") from None


@dataclass(frozen=True)
class Machine:
    """The numbers of a cluster in SI units (flop/s, bytes, bytes/s, seconds); each may be an array.

    ``peak``: of products in the chosen precision; ``peak16``: of attention; ``clock``: share of ``peak`` that a large
    product reaches.
    """

    peak: Num
    peak16: Num
    clock: Num
    memory: Num
    hbm: Num
    link: Num
    network: Num
    domain: Num
    link_latency: Num
    network_latency: Num
    site: Num
    between: Num
    between_latency: Num
    host: Num
    host_memory: Num
    host_bandwidth: Num


def machine_of(device: Device, bits: int = 16, **given: Any) -> Machine:
    """A preset's :class:`Machine`, with what is ``given`` (and not None) in its place; units of :class:`Cluster`."""
    g = {key: value for key, value in given.items() if value is not None}
    bf16 = g.get("bf16", device.bf16)
    scale = bf16 / device.bf16
    peaks = {32: bf16 / 2, 16: bf16, 8: g.get("fp8", device.fp8 * scale), 4: device.fp4 * scale}
    clocks = {32: device.clock, 16: device.clock, 8: device.low, 4: LEAST}
    if device.fp8 == device.bf16:  # no 8-bit units: nothing is gained
        clocks = dict.fromkeys(clocks, device.clock)
    return Machine(
        peak=1e12 * peaks[bits],
        peak16=1e12 * bf16,
        clock=clocks[bits],
        memory=1e9 * g.get("memory", device.memory),
        hbm=1e9 * g.get("hbm", device.hbm),
        link=1e9 * g.get("link", device.link),
        network=1e9 * g.get("network", device.network),
        domain=g.get("domain", device.domain),
        link_latency=1e-6 * g.get("link_latency", 4.0),
        network_latency=1e-6 * g.get("network_latency", 12.0),
        site=g.get("site", 1e9),
        between=1e9 * g.get("between", 1e3),
        between_latency=1e-6 * g.get("between_latency", 0.0),
        host=1e9 * g.get("host", device.host),
        host_memory=1e9 * g.get("host_memory", device.host_memory),
        host_bandwidth=1e9 * g.get("host_bandwidth", device.host_bandwidth),
    )
