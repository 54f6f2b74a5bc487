"""Locate the bytes of tensors in files of PyTorch and DCP without reading them."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import filesystem, metadata
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from weft.checkpoint.boxes import intersection
from weft.checkpoint.convert.rules import Shard
from weft.checkpoint.pack import index_within
from weft.checkpoint.storage import LocalStorage, StorageError
from weft.errors import WeftError
from weft.layout.dims import extents, slices, whole_box


@dataclass(frozen=True)
class ByteRun:
    """Contiguous bytes of a file.

    ``file``: path of the file. ``offset``: the first byte. ``size``: number of bytes.
    """

    file: Path
    offset: int
    size: int


@dataclass(frozen=True)
class StoredShard(Shard):
    """Contiguous shard of a tensor that lies in files. ``runs``: where its bytes are, in order."""

    runs: tuple[ByteRun, ...]


def stored_shard(
    name: str, shape: Sequence[int], dtype: torch.dtype, runs: tuple[ByteRun, ...]
) -> StoredShard:
    """Return a shard of a tensor that lies in files. Nothing is read yet.

    ``name``: name of the tensor, for error messages. ``shape`` and ``dtype``: shape and type of the shard. ``runs``:
    where the files have the shard's bytes, in the order of these bytes.
    """

    def read(lo: int, hi: int) -> torch.Tensor:
        out = blank_tensor((hi - lo, *shape[1:]), dtype)
        line = prod(shape[1:]) * dtype.itemsize
        read_runs(byte_range(runs, lo * line, hi * line), name, out)
        return out

    return StoredShard(tuple(shape), dtype, read, runs)


def blank_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor in memory that NumPy allocates, because NumPy reuses freed memory at once.

    PyTorch allocates with posix_memalign, which does not reuse 16 MiB that have just been freed. A process that reads a
    tensor block by block would therefore grow by the size of the whole tensor.
    """
    if not (size := prod(shape) * dtype.itemsize):
        return torch.empty(*shape, dtype=dtype)
    return torch.from_numpy(np.empty(size, np.uint8)).view(dtype).view(tuple(shape))


def byte_range(runs: Sequence[ByteRun], lo: int, hi: int) -> tuple[ByteRun, ...]:
    """Return the runs that hold bytes ``lo:hi`` of the concatenation of ``runs``.

    Raises :class:`WeftError` if the concatenation is shorter.
    """
    pieces, at = [], 0
    for run in runs:
        first, last = max(lo - at, 0), min(hi - at, run.size)
        if first < last:
            pieces.append(ByteRun(run.file, run.offset + first, last - first))
        at += run.size
    if hi > at:
        raise WeftError(
            f"{runs[0].file if runs else 'a shard'} ends {hi - at} bytes too early; it is not whole"
        )
    return tuple(pieces)


def read_runs(runs: Sequence[ByteRun], name: str, out: torch.Tensor) -> None:
    """Fill the contiguous tensor ``out`` with the bytes of ``runs``, one run after another.

    ``name``: name of the tensor, for error messages. Raises :class:`WeftError` if a file is missing or too short.
    """
    view, at = memoryview(out.view(-1).view(torch.uint8).numpy().data), 0
    for run in runs:
        try:
            LocalStorage(run.file.parent).read_into(
                run.file.name, run.offset, view[at : (at := at + run.size)]
            )
        except StorageError as error:
            raise WeftError(f"{error} (tensor {name}); copy it again") from None


def _slice_of(name: str, file: Path, info: Any) -> StoredShard:
    """Return a tensor at the place ``info`` in a file of DCP's, which holds many, each as :func:`torch.save`
    writes it.
    """
    if getattr(info, "transform_descriptors", None):
        raise WeftError(
            f"{file}: tensor {name} is transformed ({info.transform_descriptors}); save it plain"
        )
    try:
        with file.open("rb") as stream:
            view = filesystem._create_file_view(stream, info.offset, info.length)
            return as_stored(name, _fake(view), file, info.offset)
    except FileNotFoundError:
        raise WeftError(f"{file} is missing (tensor {name})") from None
    except DAMAGE as error:
        raise WeftError(f"{file} is damaged (tensor {name}): {_line(error)}") from None


#: What :func:`torch.load` raises for what is not whole.
DAMAGE = (
    OSError,
    RuntimeError,
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


class Inert:
    """Placeholder for an object in a ``torch.save`` file whose class does not belong to PyTorch.

    It holds the object's stored state. No code of the object's class runs.
    """

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def _fake(file: Any) -> Any:
    """Load a ``torch.save`` file with fake tensors, which know where their bytes are."""
    with FakeTensorMode():
        return torch.load(file, map_location="cpu", weights_only=True)


def load_tree(file: Path) -> Any:
    """Load a ``torch.save`` file with fake tensors, so that the bytes of tensors are not read.

    Objects of other classes than PyTorch's become :class:`Inert`, so no code of the file ever runs (``weights_only``
    stays on). Raises :class:`WeftError` if the file is missing or damaged.
    """
    try:
        unknown: list[Any] = [
            (Inert, name) for name in get_unsafe_globals_in_checkpoint(str(file))
        ]
        with safe_globals(unknown):
            return _fake(str(file))
    except FileNotFoundError:
        raise WeftError(f"{file} is missing") from None
    except DAMAGE as error:
        raise WeftError(
            f"{file} cannot be read by torch.load: {_line(error)}"
        ) from None


def as_stored(name: str, fake: torch.Tensor, file: Path, base: int = 0) -> StoredShard:
    """Return a stored shard for ``fake``, a tensor that :func:`load_tree` has loaded without its bytes.

    The shard reads the bytes from ``file`` when they are needed. ``name``: the tensor, for error messages; ``base``:
    the byte of ``file`` at which the saved archive begins (0 if the archive is the whole file). Raises
    :class:`WeftError` if the tensor is not contiguous, or the file is in PyTorch's format of before 1.6.
    """
    offset = getattr(fake.untyped_storage(), "_checkpoint_offset", None)
    if offset is None or not fake.is_contiguous():
        why = (
            "is not contiguous"
            if offset is not None
            else "is in PyTorch's format of before 1.6"
        )
        raise WeftError(f"{file}: tensor {name} {why}; save it again with torch.save")
    begin = base + offset + fake.storage_offset() * fake.dtype.itemsize
    return stored_shard(
        name,
        fake.shape,
        fake.dtype,
        (ByteRun(file, begin, fake.numel() * fake.dtype.itemsize),),
    )


class _MetadataUnpickler(pickle.Unpickler):
    """DCP's ``.metadata`` is a pickle: let in the descriptions that it is made of, and nothing that does anything."""

    def find_class(self, module: str, name: str) -> Any:
        home = {m.__name__: m for m in (metadata, filesystem)}.get(module)
        kind = getattr(home, name, None)
        if (
            isinstance(kind, type)
            and kind.__module__ == module
            and (home is metadata or name == "_StorageInfo")
        ):
            return kind
        if module == "torch" and (
            name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return getattr(torch, name)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        return Inert


class Reader(dcp.FileSystemReader):
    """Reader of PyTorch DCP checkpoints that runs no code of the checkpoint.

    It replaces PyTorch's reader, whose ``pickle.load`` of the metadata could run such code.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        file = Path(self.path) / ".metadata"
        try:
            with file.open("rb") as stream:
                about = _MetadataUnpickler(stream).load()
            if not isinstance(about, metadata.Metadata) or about.storage_data is None:
                raise ValueError
        except FileNotFoundError:
            raise WeftError(
                f"{file} is missing; give a folder that DCP wrote"
            ) from None
        except Exception as error:  # whatever a damaged pickle raises
            raise WeftError(f"{file} is damaged ({type(error).__name__})") from None
        return about

    def tensors(self) -> dict[str, Shard]:
        """Return every stored tensor by name, as one shard that is read on demand."""
        stored = self.read_metadata()
        about = {
            n: t
            for n, t in stored.state_dict_metadata.items()
            if isinstance(t, metadata.TensorStorageMetadata)
        }
        return {
            name: self._tensor(name, meta, stored.storage_data)
            for name, meta in about.items()
        }

    def _tensor(
        self, name: str, about: metadata.TensorStorageMetadata, places: Any
    ) -> Shard:
        shape, dtype = tuple(about.size), about.properties.dtype
        boxes = []
        for chunk in about.chunks:
            box = tuple(
                (at, at + n) for at, n in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            boxes.append((box, places.get(metadata.MetadataIndex(name, chunk.offsets))))

        # a tensor is read in pieces, and the head of its part need not be read for each
        @cache
        def opened(number: int) -> StoredShard:
            info = boxes[number][1]
            return _slice_of(name, Path(self.path) / info.relative_path, info)

        def read(lo: int, hi: int) -> torch.Tensor:
            out, filled = blank_tensor((hi - lo, *shape[1:]), dtype), 0
            for number, (box, info) in enumerate(boxes):
                if (
                    info is None
                    or (both := intersection(box, ((lo, hi), *whole_box(shape[1:]))))
                    is None
                ):
                    continue
                first, last = both[0]
                part = opened(number)
                if part.shape != extents(box):
                    raise WeftError(
                        f"{self.path}: tensor {name} has a part of another shape than was saved"
                    )
                values = part.read(first - box[0][0], last - box[0][0])
                to = (slice(first - lo, last - lo), *slices(both[1:]))
                out[to] = values[(slice(None), *index_within(both[1:], box[1:]))]
                filled += out[to].numel()
            if filled != out.numel():
                raise WeftError(
                    f"{self.path}: tensor {name} has {out.numel() - filled} elements that no file holds"
                )
            return out

        return Shard(shape, dtype, read)
