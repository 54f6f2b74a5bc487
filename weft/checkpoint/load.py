"""Load a checkpoint: read the blocks that a rank's boxes need once, verify them, and copy their elements."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weft.checkpoint.boxes import ROOT, DamagedCheckpoint, checksum, intersection
from weft.checkpoint.format import Manifest, StoredBlock, read_tensor, unseal
from weft.checkpoint.pack import (
    Elements,
    copy_common,
    elements,
    group_by_bytes,
    index_within,
)
from weft.checkpoint.storage import MissingObject, Storage
from weft.errors import WeftError
from weft.layout.parts import TORCH_DTYPES, Part

if TYPE_CHECKING:
    from weft.layout.dims import Box, Tensor


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's cyclic garbage collection: going through a manifest's many small objects takes longer than
    reading them, and none of them is in a cycle."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class StoredCheckpoint:
    """Committed checkpoint in a storage, opened for reading.

    ``storage``: the storage whose root is the checkpoint; ``progress``: called after each read with the number of bytes
    read. Two attributes measure the loading: ``bytes_read``, the bytes of data files read so far, and ``seconds``, the
    seconds spent in each stage ("plan", "read", "verify", "unpack").
    """

    def __init__(
        self, storage: Storage, progress: Callable[[int], object] = lambda count: None
    ) -> None:
        self.storage, self.bytes_read, self.progress = storage, 0, progress
        self.seconds: dict[str, float] = defaultdict(float)
        self._manifests: dict[str, Manifest] = {}
        self._near: dict[tuple[int, Box], list[int]] = {}

    def __str__(self) -> str:
        return str(self.storage)

    def damaged(self, what: str) -> DamagedCheckpoint:
        """Return an error that this checkpoint is damaged. ``what``: description of the damage."""
        return DamagedCheckpoint(f"checkpoint {self} is damaged: {what}")

    @cached_property
    def meta(self) -> dict[str, Any]:
        """Contents of the checkpoint's root file: step, progress, recipe, layout, and the index of tensors.

        Raises :class:`DamagedCheckpoint` if the root file is missing, damaged, or of a format that this Weft cannot
        read.
        """
        try:
            data = self.storage.read(ROOT)
        except MissingObject:
            raise DamagedCheckpoint(
                f"{self} is not a checkpoint: it has no {ROOT}"
            ) from None
        return unseal(data, str(self))

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Description (shape, dtype) of every stored tensor, by name."""
        return {name: read_tensor(tree) for name, tree in self.meta["tensors"].items()}

    def blocks(self, name: str, box: Box) -> list[StoredBlock]:
        """Return the stored blocks of tensor ``name`` that overlap ``box``. Each manifest is read only once."""
        place = self.meta["tensors"][name]["place"]
        if (place, box) not in self._near:  # many tensors are spread alike
            where = self.meta["places"][place]
            self._near[place, box] = [
                n
                for n, edges in where
                if intersection(tuple((a, b) for a, b in edges), box) is not None
            ]
        manifests = [
            self._manifest(*self.meta["manifests"][n]) for n in self._near[place, box]
        ]
        return [block for manifest in manifests for block in manifest.blocks(name, box)]

    def _manifest(self, name: str, size: int, xxh3: str) -> Manifest:
        if name not in self._manifests:
            self._manifests[name] = Manifest(
                self.file(name, size, xxh3), f"{self}/{name}"
            )
        return self._manifests[name]

    def file(self, name: str, size: int, xxh3: str) -> bytes:
        """Read the small file ``name``, such as a manifest or the tokenizer, and verify it.

        ``size`` and ``xxh3``: the bytes and the digest that the root file lists. Raises :class:`DamagedCheckpoint` if
        they differ from those of the file.
        """
        try:
            data = self.storage.read(name)
        except MissingObject:
            raise self.damaged(f"{name} is missing") from None
        if len(data) != size or checksum(data) != xxh3:
            raise self.damaged(f"{name} is not what was saved")
        return data

    def all_blocks(self) -> Iterator[StoredBlock]:
        """Yield the blocks of all tensors, in the order of the manifests."""
        for manifest in self.meta["manifests"]:
            yield from self._manifest(*manifest)

    def read_all(self, blocks: Iterable[StoredBlock]) -> Iterator[memoryview]:
        """Read and verify ``blocks``, and yield the bytes of each block in the order of ``blocks``.

        Blocks that follow each other in a file are read together. Raises :class:`DamagedCheckpoint` for a block whose
        bytes do not match its digest.
        """
        for group in _side_by_side(blocks, self.storage.granule):
            for _, data in self.read(group):
                yield data

    def read(
        self,
        group: list[StoredBlock],
        places: Mapping[StoredBlock, memoryview] = MappingProxyType({}),
        scratch: memoryview | None = None,
    ) -> Iterator[tuple[StoredBlock, memoryview]]:
        """Read and verify a group of blocks, and yield each block with its bytes.

        ``group``: blocks that follow each other without a gap in one file; ``places``: for some of the blocks, the
        memory to read each into; ``scratch``: one memory for the bytes of all other blocks, by default newly allocated.
        Raises :class:`DamagedCheckpoint` for a block whose bytes do not match its digest.
        """
        first, size, at = group[0], sum(b.size for b in group), 0
        begun = time.perf_counter()
        scratch = scratch or memoryview(bytearray(size))
        buffers = [
            places[b] if b in places else scratch[at : (at := at + b.size)]
            for b in group
        ]
        try:
            self.storage.read_into(first.file, first.offset, *buffers)
        except MissingObject as error:
            raise self.damaged(f"{error} (tensor {first.tensor})") from None
        self.bytes_read += size
        self.progress(size)
        self.seconds["read"] += time.perf_counter() - begun
        for block, data in zip(group, buffers, strict=True):
            begun = time.perf_counter()
            stored = checksum(data)
            self.seconds["verify"] += time.perf_counter() - begun
            if stored != block.digest:
                raise self.damaged(
                    f"{block.file} is not what was saved (tensor {block.tensor})"
                )
            yield block, data

    @_no_collection()
    def load(self, locals_: Mapping[str, Part]) -> None:
        """Fill this rank's parts of tensors from the checkpoint, in place.

        ``locals_``: the parts, by the tensor's name in the checkpoint. Raises :class:`WeftError` with a table of
        differences if names or shapes do not match, and :class:`DamagedCheckpoint` if stored bytes differ from the
        saved bytes.
        """
        begun = time.perf_counter()
        self.check_fits(locals_)
        wanted = {
            name: self.blocks(name, v.box)
            for name, v in locals_.items()
            if v.values.numel()
        }
        self.seconds["plan"] += time.perf_counter() - begun
        dtypes = {n: TORCH_DTYPES[self.tensors[n].dtype] for n in wanted}
        as_stored = [
            n
            for n in wanted
            if locals_[n].values.is_cpu and locals_[n].values.dtype == dtypes[n]
        ]
        self._fill(
            {n: (memory_of(locals_[n].values), locals_[n].box) for n in as_stored},
            [block for n in as_stored for block in wanted[n]],
        )
        # of another type or on another device: one at a time
        for name in wanted.keys() - set(as_stored):
            local = locals_[name]
            values = torch.empty(local.values.shape, dtype=dtypes[name])
            self._fill({name: (memory_of(values), local.box)}, wanted[name])
            local.values.copy_(values)

    def _fill(
        self, targets: Mapping[str, tuple[Elements, Box]], blocks: Iterable[StoredBlock]
    ) -> None:
        groups = list(
            _side_by_side(
                sorted(blocks, key=lambda b: (b.file, b.offset)), self.storage.granule
            )
        )
        largest = max((sum(b.size for b in group) for group in groups), default=0)
        # PyTorch's memory is aligned: the system copies to it at full speed, which Python's and NumPy's need not be.
        scratch = torch.empty(largest, dtype=torch.uint8).numpy().data
        for group in groups:
            places = {
                b: place
                for b in group
                if (place := _whole(*targets[b.tensor], b.box)) is not None
            }
            for block, data in self.read(group, places, scratch):
                begun = time.perf_counter()
                if block not in places:
                    stored = elements(
                        data, block.box, self.tensors[block.tensor].itemsize
                    )
                    copy_common(*targets[block.tensor], stored, block.box)
                self.seconds["unpack"] += time.perf_counter() - begun

    def check_fits(self, locals_: Mapping[str, Part]) -> None:
        """Check that the checkpoint has the tensor of every part in ``locals_`` (by name), with the same shape.

        Raises :class:`WeftError` with a table of differences if it has not.
        """
        rows = []
        for name, local in locals_.items():
            stored = self.tensors.get(name)
            if stored is None:
                rows.append(f"missing   {name} {list(local.tensor.shape)}")
            elif stored.shape != local.tensor.shape:
                rows.append(
                    f"different {name}: stored {list(stored.shape)}, needed {list(local.tensor.shape)}"
                )
        # optimizer state only says the same again
        rows = [row for row in rows if " model." in row] or rows
        if rows:
            rows += [
                f"extra     {name}"
                for name in self.tensors
                if name not in locals_ and name.startswith("model.")
            ]
            more = [f"... and {len(rows) - 20} more"] if len(rows) > 20 else []
            other = (
                "is of another model"
                if any(" model." in row for row in rows)
                else "lacks state of the optimizer"
            )
            raise WeftError(
                "\n  ".join([f"checkpoint {self} {other}:", *rows[:20], *more])
            )


def memory_of(values: torch.Tensor) -> Elements:
    """Return a NumPy array that shares the memory of the CPU tensor ``values``.

    Its elements are opaque unsigned integers of the same size, because NumPy lacks types such as bfloat16.
    """
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    elements: Elements = values.detach().view(kinds[values.element_size()]).numpy()
    return elements.view(f"u{values.element_size()}")


def _whole(target: Elements, target_box: Box, box: Box) -> memoryview | None:
    """Return the bytes of ``target`` for the elements ``box`` if they are contiguous, else None."""
    if intersection(target_box, box) != box:
        return None
    index: tuple[Any, ...] = (
        *index_within(box, target_box),
        ...,
    )  # of a scalar, too, a view
    part = target[index]
    return part.reshape(-1).view(np.uint8).data if part.flags.c_contiguous else None


def _side_by_side(
    blocks: Iterable[StoredBlock], most: int
) -> Iterator[list[StoredBlock]]:
    """Runs of blocks that follow each other in one file, of at most ``most`` bytes (or one block)."""
    return group_by_bytes(
        blocks,
        most,
        lambda b: b.size,
        lambda a, b: (a.file, a.offset + a.size) == (b.file, b.offset),
    )
