"""Loading: the blocks that a rank's boxes need, read once, verified, and put where they belong."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch

from weft.checkpoint.format import (
    ROOT,
    Block,
    DamagedCheckpoint,
    Tensor,
    digest,
    meet,
    read_manifest,
    read_tensor,
    unseal,
)
from weft.checkpoint.save import TORCH_DTYPES, Local, within
from weft.checkpoint.storage import MissingObject, Storage
from weft.errors import WeftError
from weft.layout.dims import Box

#: Blocks that lie side by side are read together, up to this many bytes.
READ = 16 << 20


class Checkpoint:
    """A committed checkpoint. ``bytes_read`` counts what was read of data files."""

    def __init__(self, storage: Storage) -> None:
        self.storage, self.bytes_read = storage, 0
        self._manifests: dict[str, dict[str, list[Block]]] = {}
        self._near: dict[tuple[int, Box], list[int]] = {}

    def __str__(self) -> str:
        return str(self.storage)

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The root. Raises :class:`WeftError` if there is none, or none that this Weft can read."""
        try:
            data = self.storage.read(ROOT)
        except MissingObject:
            raise WeftError(f"{self} is not a checkpoint: it has no {ROOT}") from None
        return unseal(data, str(self))

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return {name: read_tensor(tree) for name, tree in self.meta["tensors"].items()}

    def blocks(self, name: str, box: Box) -> list[Block]:
        """The blocks of tensor ``name`` that have elements of ``box``; reads the manifests that it needs, once."""
        place = self.meta["tensors"][name]["place"]
        if (place, box) not in self._near:  # many tensors are spread alike
            where = self.meta["places"][place]
            self._near[place, box] = [n for n, edges in where if meet(tuple((a, b) for a, b in edges), box) is not None]
        manifests = [self._manifest(*self.meta["manifests"][n]) for n in self._near[place, box]]
        return [b for manifest in manifests for b in manifest.get(name, ()) if meet(b.box, box) is not None]

    def _manifest(self, name: str, size: int, xxh3: str) -> dict[str, list[Block]]:
        if name not in self._manifests:
            data = self.file(name, size, xxh3)
            by_tensor: dict[str, list[Block]] = {}
            for block in read_manifest(data, f"{self}/{name}")[1]:
                by_tensor.setdefault(block.tensor, []).append(block)
            self._manifests[name] = by_tensor
        return self._manifests[name]

    def file(self, name: str, size: int, xxh3: str) -> bytes:
        """A small file that the root lists, verified."""
        try:
            data = self.storage.read(name)
        except MissingObject:
            raise DamagedCheckpoint(f"checkpoint {self} is damaged: {name} is missing") from None
        if len(data) != size or digest(data) != xxh3:
            raise DamagedCheckpoint(f"checkpoint {self} is damaged: {name} is not what was saved")
        return data

    def all_blocks(self) -> Iterator[Block]:
        for manifest in self.meta["manifests"]:
            for blocks in self._manifest(*manifest).values():
                yield from blocks

    def verify(self) -> int:
        """Read everything and check it; the bytes read. Raises :class:`DamagedCheckpoint` naming what is wrong."""
        for name, (size, xxh3) in self.meta["files"].items():
            self.file(name, size, xxh3)
        read = 0
        for group in _side_by_side(sorted(self.all_blocks(), key=lambda b: (b.file, b.offset))):
            for _ in self.read(group):
                pass
            read += sum(b.size for b in group)
        return read

    def read(self, group: list[Block]) -> Iterator[tuple[Block, memoryview]]:
        """The verified bytes of blocks that lie side by side in one file."""
        first, size = group[0], sum(b.size for b in group)
        buffer = memoryview(bytearray(size))
        try:
            self.storage.read_into(first.file, first.offset, buffer)
        except MissingObject as error:
            raise DamagedCheckpoint(f"checkpoint {self} is damaged: {error} (tensor {first.tensor})") from None
        self.bytes_read += size
        at = 0
        for block in group:
            data = buffer[at : at + block.size]
            at += block.size
            if digest(data) != block.digest:
                raise DamagedCheckpoint(
                    f"checkpoint {self} is damaged: {block.file} is not what was saved (tensor {block.tensor})"
                )
            yield block, data

    def load(self, locals_: Mapping[str, Local]) -> None:
        """Fill every part in place. Raises :class:`WeftError` with a table if names or shapes do not fit."""
        self._check_fits(locals_)
        held = {name: local for name, local in locals_.items() if local.values.numel()}
        wanted = [block for name, local in held.items() for block in self.blocks(name, local.box)]
        for group in _side_by_side(sorted(wanted, key=lambda b: (b.file, b.offset))):
            for block, data in self.read(group):
                local = locals_[block.tensor]
                common = meet(block.box, local.box)
                assert common is not None
                dtype = TORCH_DTYPES[self.tensors[block.tensor].dtype]
                stored = torch.frombuffer(data, dtype=dtype).view([hi - lo for lo, hi in block.box])
                local.values[within(common, local.box)] = stored[within(common, block.box)].to(local.values.dtype)

    def _check_fits(self, locals_: Mapping[str, Local]) -> None:
        rows = []
        for name, local in locals_.items():
            stored = self.tensors.get(name)
            if stored is None:
                rows.append(f"missing   {name} {list(local.tensor.shape)}")
            elif stored.shape != local.tensor.shape:
                rows.append(f"different {name}: stored {list(stored.shape)}, needed {list(local.tensor.shape)}")
        rows = [row for row in rows if " model." in row] or rows  # optimizer state only says the same again
        if rows:
            rows += [f"extra     {name}" for name in self.tensors if name not in locals_ and name.startswith("model.")]
            more = [f"... and {len(rows) - 20} more"] if len(rows) > 20 else []
            raise WeftError("\n  ".join([f"checkpoint {self} is of another model:", *rows[:20], *more]))


def _side_by_side(blocks: list[Block]) -> Iterator[list[Block]]:
    """Runs of blocks that follow each other in one file, of at most :data:`READ` bytes (or one block)."""
    group: list[Block] = []
    for block in blocks:
        end = group[-1].offset + group[-1].size if group else -1
        total = sum(b.size for b in group) + block.size
        if group and (block.file != group[-1].file or block.offset != end or total > READ):
            yield group
            group = []
        group.append(block)
    if group:
        yield group
