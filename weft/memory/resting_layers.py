"""Layers whose weights rest in a file while a model generates, with room in memory for a window of them (TPI-LLM).

While a layer computes, threads read the next one into the memory of a past one (Li et al. 2024, 2410.00531). Of a
window of N layers, N - 1 stay in memory, spread evenly over the model, and the others pass through two more places: one
computes, one is being read. Each pass then reads all layers but those N - 1; a window that slides over the whole model
would read all of them, as what it keeps is always what was just used, and is used again last.

Norms, biases, routers, the embedding and the output layer stay in memory. Records keep the type that the weights have
where they come from, and are widened when they are used, as bfloat16 is half as many bytes to read.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from weft.errors import UsageError, WeftError
from weft.layout.dims import Logical
from weft.memory.kept_records import keep_records
from weft.memory.records import Slots
from weft.memory.tier_file import TierFile, page_buffer
from weft.models.module import Module
from weft.models.projections import Projections
from weft.models.router import Router
from weft.models.transformer import Transformer
from weft.models.values import Values

T = torch.Tensor

#: Weights in a record begin at multiples of this many bytes.
ALIGNED = 64


class Resting(Protocol):
    """Interface of an object that keeps some weights of a model outside the device's memory while the model generates.

    ``lines``: lines for the user about files and disks.
    """

    lines: list[str]

    def lift(self, model: Transformer, values: Values) -> None:
        """Move weights of ``model`` to where they rest, and replace the modules that compute with them.

        The model's parameters must not be allocated yet. ``values``: function that reads the values of a parameter.
        """

    def report(self) -> str:
        """Return a line for the user that says how many of the resting weights were used, and how many were read."""


@dataclass(frozen=True)
class RestingWeight:
    """A weight of a layer, stored at some offset in the layer's record (its bytes in the file).

    Attributes:
        ``module``: the module that computes with the weight.
        ``name``: its name in this module.
        ``path``: its name in the model.
        ``logical``: the whole weight, and the part of it that this rank has.
        ``dtype``: its data type in the record.
        ``offset``: its first byte in the record.
        ``widened``: its first byte in the memory for weights converted to the model's wider type; None if the model
            computes with the record's type.
    """

    module: Module
    name: str
    path: str
    logical: Logical
    dtype: torch.dtype
    offset: int
    widened: int | None

    def view(self, memory: T, offset: int, dtype: torch.dtype) -> T:
        """Return the weight as a view of ``memory`` (uint8), where it begins at the byte ``offset``. ``dtype``: data
        type of its elements there.
        """
        shape = self.logical.local_shape
        size = prod(shape) * dtype.itemsize
        return memory[offset : offset + size].view(dtype).view(shape)


class LayerRecord(NamedTuple):
    """The weights of one layer, as a record of a file holds them.

    ``weights``: the weights. ``size``: bytes of the record. ``widened``: bytes of memory for those weights that are
    converted from the record's type to the model's wider type.
    """

    weights: list[RestingWeight]
    size: int
    widened: int


class RestingLayers:
    """Keeps the weights of a model's layers in a file while the model generates, with room in memory for some layers.

    ``folder``: folder of the file; ``window``: number of layers that have room in memory; ``least_rate``: least number
    of tokens per second that a text must get, 0 for no demand; ``dtype``: type in which the model computes; ``hold``:
    whether all but one layer of the window stay in memory for good. If not, every layer is read in each pass, in turn.

    Attributes:
        ``lines``: lines for the user about the file and the disk.
        ``held``: indices of the layers that stay in memory.
        ``streamed``: indices of the layers that are read in each pass.
    """

    slots: Slots
    file: TierFile

    def __init__(
        self, folder: Path, window: int, least_rate: float = 0, dtype: torch.dtype = torch.float32, hold: bool = True
    ) -> None:  # fmt: skip
        self.folder, self.window, self.least_rate = folder, window, least_rate
        self.dtype, self.hold = dtype, hold
        self.lines: list[str] = []
        self.held: list[int] = []
        self.streamed: list[int] = []
        self._layers: dict[int, LayerRecord] = {}
        self._memory: dict[int, T] = {}  # of the layers that stay
        self._views: dict[tuple[int, int], list[T]] = {}
        self._using: Iterator[list[tuple[int, T]]] | None = None

    def lift(self, model: Transformer, values: Values) -> None:
        """Store the weights of the layers of ``model`` in the file, and load each layer's weights while it computes.

        If the window has room for all layers, the model stays as it is. ``model``: its parameters must not be allocated
        yet; ``values``: function that reads the values of a parameter. Raises :class:`UsageError` for a plugin's model,
        or a window larger than the model; :class:`WeftError` if the disk is too slow for the rate.
        """
        count = len(model.blocks)
        if model.shape.kind:
            raise UsageError(
                f"--layers-in is for Weft's own models, and {model.shape.kind} is a plugin's; leave it out"
            )
        if self.window > model.shape.layers:
            raise UsageError(
                f"--window {self.window} is more than the {model.shape.layers} layers of the model; give fewer"
            )
        if self.window >= count:
            self.lines = [f"all {count} layers have room in memory; none rests elsewhere"]  # fmt: skip
            return
        digest = blake2b(digest_size=16)
        numbers = sorted(map(int, model.blocks))
        for i in numbers:
            self._layers[i] = self._described(model.blocks[str(i)], i, values, digest)
        self._store(model, values, digest.hexdigest())
        for i in numbers:
            block = model.blocks[str(i)]
            block.register_forward_pre_hook(partial(self._before, i))
            block.register_forward_hook(partial(self._after, i))

    def _described(self, block: Any, layer: int, values: Values, digest: Any) -> LayerRecord:  # fmt: skip
        """Take the weights out of a block, and enter them in the ``digest`` of all content."""
        weights, offset, widened = list[RestingWeight](), 0, 0
        for prefix, module in block.named_modules(prefix=f"blocks.{layer}"):
            if not isinstance(module, Module) or isinstance(module, Router):
                continue
            for name, logical in module.logical.items():
                parameter = module._parameters.get(name)
                if parameter is None or len(logical.shape) < 2 or logical.everywhere:
                    continue
                path = f"{prefix}.{name}"
                data = self._narrowed(values(path, logical, logical.box))
                wider = data.is_floating_point() and data.dtype != self.dtype
                place = offset, widened if wider else None
                weights.append(
                    RestingWeight(module, name, path, logical, data.dtype, *place)
                )
                digest.update(f"{path} {data.dtype} {tuple(data.shape)}".encode())
                digest.update(data.contiguous().flatten().view(torch.uint8).numpy().data)  # fmt: skip
                offset += _aligned(data.nbytes)
                widened += _aligned(data.numel() * self.dtype.itemsize) * wider
                del module._parameters[name]
                if isinstance(module, Projections):
                    module.elsewhere = True
        return LayerRecord(weights, offset, widened)

    def _narrowed(self, data: T) -> T:
        """Return ``data`` in the type in which it is stored: never wider than what the model computes with."""
        if data.is_floating_point() and data.dtype.itemsize > self.dtype.itemsize:
            return data.to(self.dtype)
        return data

    def _store(self, model: Transformer, values: Values, digest: str) -> None:
        """Open or write the file, and read the layers that stay, and the first of the others."""
        device, layers = model.mesh.device, [*self._layers.values()]

        def fill(index: int, record: T) -> None:
            for weight in layers[index].weights:
                data = values(weight.path, weight.logical, weight.logical.box)
                weight.view(record, weight.offset, weight.dtype).copy_(data)

        size = max(layer.size for layer in layers)
        records, self.file, _, lines = keep_records(
            self.folder, "--layers-in", f"layers-{digest}", len(layers), size, fill, device
        )  # fmt: skip
        self.lines += [*lines, *filter(None, [self.file.note])]
        numbers = [*self._layers]
        self._record = {layer: index for index, layer in enumerate(numbers)}
        self.held = spread_evenly(numbers, self.window - 1 if self.hold else 0)
        self.streamed = [i for i in numbers if i not in self.held]
        widened = max(layer.widened for layer in layers)
        self._widened = torch.empty(widened, dtype=torch.uint8, device=device)
        self.slots = Slots(records, self.window + 1 - len(self.held), device)
        began = time.perf_counter()
        for layer in self.held:
            self._memory[layer] = memory_for(records.size, device)
        coming = [records.read(self._record[i], self._memory[i]) for i in self.held]
        first = [self._record[i] for i in self.streamed[: self.slots.count]]
        for transfer in coming:
            transfer.wait()
        for _ in self.slots.using(first):
            self.slots.counts["awaited"] = 0  # no layer has waited for this
        self._compare(len(coming) + len(first), time.perf_counter() - began)

    def _compare(self, read: int, seconds: float) -> None:
        """Note what rate the disk permits. ``read``: number of records that were read in so many ``seconds``."""
        size = self.slots.records.size
        speed = read * size / max(seconds, 1e-9)
        self.lines.append(
            f"{self.window} of {len(self._layers)} layers have room in memory, {self.resident_bytes / 1e6:,.0f} MB"
        )
        if len(self.streamed) <= self.slots.count:
            return
        bytes_read = len(self.streamed) * size
        rate = speed / bytes_read
        reads = f"reads {speed / 1e9:.2g} GB/s"
        self.lines.append(
            f"this disk {reads}, and each pass {bytes_read / 1e6:,.0f} MB of it: at most {rate:.2g} tokens/s of a text"
        )
        if rate < self.least_rate:
            raise WeftError(
                f"--least-rate {self.least_rate:g} is more than this disk permits: it {reads}, and each token needs "
                f"{bytes_read / 1e6:,.0f} MB, which is {rate:.2g} tokens/s; give a larger --window, or a quicker disk"
            )

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory for weights: layers that stay, room for the layers that are read, and converted weights."""
        if not self._layers or self.window >= len(self._layers):
            return 0
        places = len(self.held) + self.slots.count
        return places * self.slots.records.size + self._widened.numel()

    def report(self) -> str:
        """Return a line for the user about the bytes that were read, and how often computation waited for a layer."""
        if not self.streamed:
            return "all layers were in memory"
        counts, size = self.slots.counts, self.slots.records.size
        return (
            f"{counts['read']:,} layers were read from {self.folder}, {counts['read'] * size / 1e6:,.0f} MB, and "
            f"{counts['awaited']:,} were waited for; {self.resident_bytes / 1e6:,.0f} MB of layers were in memory"
        )

    def _before(self, layer: int, block: Any, given: object) -> None:
        """Give a layer its weights, and begin to read the next one."""
        self._release()
        memory = self._memory.get(layer)
        if memory is None:
            record = self._record[layer]
            self._using = self.slots.using([record])
            ((_, memory),) = next(self._using)
            at = self.streamed.index(layer)
            ahead = range(1, min(self.slots.count, len(self.streamed)))
            following = [self.streamed[(at + n) % len(self.streamed)] for n in ahead]
            self.slots.expect([self._record[i] for i in following])
        key = layer, memory.data_ptr()
        if key not in self._views:
            self._views[key] = [w.view(memory, w.offset, w.dtype) for w in self._layers[layer].weights]  # fmt: skip
        for weight, stored in zip(self._layers[layer].weights, self._views[key], strict=True):  # fmt: skip
            view = stored
            if weight.widened is not None:
                view = weight.view(self._widened, weight.widened, self.dtype)
                view.copy_(stored)
            object.__setattr__(weight.module, weight.name, view)

    def _after(self, layer: int, block: Any, given: object, output: object) -> None:
        """Take a layer's weights away again: their memory is the next one's."""
        for weight in self._layers[layer].weights:
            object.__delattr__(weight.module, weight.name)
        self._release()

    def _release(self) -> None:
        """Let the place of the layer that computed last be used again."""
        if self._using is not None:
            next(self._using, None)
            self._using = None


def memory_for(size: int, device: torch.device) -> T:
    """Return ``size`` bytes of memory of ``device``, uint8, into which a file can be read."""
    if device.type == "cpu":
        return page_buffer(size)
    return torch.empty(size, dtype=torch.uint8, device=device)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def spread_evenly(numbers: list[int], count: int) -> list[int]:
    """Return ``count`` entries of the list ``numbers``, at positions that are spread over the list as evenly as
    possible.
    """
    total = len(numbers)
    return [n for i, n in enumerate(numbers) if (i + 1) * count // total > i * count // total]  # fmt: skip
