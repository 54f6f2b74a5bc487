"""Write an open checkpoint in Weft's, Hugging Face's, DCP's or GGUF format, with one tensor in memory at a time."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from weft.checkpoint.address import Where, open_storage
from weft.checkpoint.convert.foreign import Foreign
from weft.checkpoint.convert.gguf_write import KINDS, export_gguf
from weft.checkpoint.convert.rules import CHUNK
from weft.checkpoint.convert.sources import open_foreign
from weft.checkpoint.convert.upcycle import upcycled
from weft.checkpoint.format import cut_blocks
from weft.checkpoint.storage import LocalStorage, Storage
from weft.checkpoint.store import is_new
from weft.checkpoint.writer import write_whole
from weft.errors import UsageError, WeftError, nearest
from weft.layout.dims import Tensor, slices, whole_box
from weft.layout.parts import NAMES, TORCH_DTYPES
from weft.models.hugging_face import TYPICAL, as_hf, export, exported_dtype
from weft.new_folder import new_folder
from weft.recipe import Recipe
from weft.shapes.carried_files import CONFIG, as_json, carried_config, exported_config
from weft.shapes.foreign_names import hf_names
from weft.writable import check_writable

#: Files of a Hugging Face export hold at least this much, if a tensor is not larger.
FILE_BYTES = 128 << 20


def convert(
    source: Where, out: Where, kind: str | None = None, to: str = "weft", config: Path | None = None,
    dtype: torch.dtype | None = None, optimizer: bool = True, upcycle: str | None = None,
) -> Foreign:  # fmt: skip
    """Convert the checkpoint ``source`` to another format, and write it to the new folder or file ``out``.

    ``kind``: format of ``source``, by default detected; ``to``: format of ``out``, one of :data:`WRITERS`; ``config``:
    the model's ``config.json``, if it lies elsewhere; ``dtype``: type of the written weights (None: as stored);
    ``optimizer``: whether to write the optimizer's moments; ``upcycle``: settings of experts that replace dense layers
    (:func:`.upcycled_shape`), or None. Returns the opened checkpoint that was written. Raises :class:`WeftError`, and
    then leaves no checkpoint at ``out``.
    """
    if to not in WRITERS:
        raise UsageError(f"--to {to!r} is not possible; {nearest(to, WRITERS)}")
    place = open_storage(out)
    if to != "weft" and not isinstance(place, LocalStorage):
        raise UsageError(f"--to {to} makes a folder on this machine; {out} is none")
    if isinstance(place, LocalStorage):
        check_writable(place.root, "--out", folder=True)
    if not is_new(place):
        raise WeftError(f"--out {out} exists already; choose another folder")
    foreign = open_foreign(source, kind, config)
    _check_kind(foreign, to, upcycle)
    if upcycle is not None:
        foreign = upcycled(foreign, upcycle)
    WRITERS[to](foreign, place if to == "weft" else Path(str(out)), dtype, optimizer)
    return foreign


def _check_kind(foreign: Foreign, to: str, upcycle: str | None) -> None:
    """Raise :class:`UsageError` for what only models of tokens can become."""
    kind = foreign.model.kind
    if not kind:
        return
    forms = ["weft", *["hf"] * (kind == "diffusion")]
    wrong = f"--to {to}" if to not in forms else "--upcycle" if upcycle else ""
    if wrong:
        raise UsageError(
            f"{wrong} is of models of tokens, and {foreign.path} is of kind {kind!r}; leave it out (--to may be "
            f"{' or '.join(forms)})"
        )


class _Output(NamedTuple):
    """A tensor to write: a parameter, or a moment of it if ``moment`` is not empty. ``about``: its shape and type."""

    parameter: str
    moment: str
    about: Tensor

    def read(self, foreign: Foreign) -> torch.Tensor:
        return foreign.read(self.parameter, TORCH_DTYPES[self.about.dtype], self.moment)


def _plan(
    foreign: Foreign, dtype: torch.dtype | None, optimizer: bool
) -> dict[str, _Output]:
    """Every tensor to write, by the name that Weft's checkpoints have for it. Moments keep their types."""
    outputs: dict[str, _Output] = {}
    for moment in ("", *(foreign.moments if optimizer else ())):
        sources = foreign.moments[moment] if moment else foreign.sources
        for name, row in foreign.table.items():
            if name in sources:
                kept = sources[name].dtype if moment or dtype is None else dtype
                about = Tensor(
                    row.shape, NAMES[kept], tuple(dim.name for dim in row.dims)
                )
                outputs[f"optimizer.{moment}.{name}" if moment else f"model.{name}"] = (
                    _Output(name, moment, about)
                )
    return outputs


def write_weft(
    foreign: Foreign, out: Storage, dtype: torch.dtype | None, optimizer: bool
) -> None:
    """Write ``foreign`` as a Weft checkpoint with one data file to the storage ``out``.

    ``dtype``: type of the written weights (None: as stored); ``optimizer``: whether to write the optimizer's moments.
    """
    wanted = _plan(foreign, dtype, optimizer)
    tensors = {name: output.about for name, output in sorted(wanted.items())}
    boxes = [(name, box) for name, t in tensors.items() if t.numel
             for box in cut_blocks(whole_box(t.shape), t.shape, t.itemsize)]  # fmt: skip

    def contents() -> Iterator[memoryview]:
        values, held = torch.empty(0), ""
        for name, box in boxes:
            if name != held:
                values = torch.empty(0)  # gone before the next one is made
                values, held = wanted[name].read(foreign), name
            yield (
                values[slices(box)].contiguous().view(-1).view(torch.uint8).numpy().data
            )

    write_whole(
        out,
        boxes,
        tensors,
        contents,
        _meta(foreign, out),
        dict(sorted(foreign.files.items())),
    )


def _meta(foreign: Foreign, out: Storage) -> dict[str, Any]:
    recipe = Recipe(name=out.name or "converted", model=foreign.model).model_dump(
        mode="json"
    )
    about = {"step": foreign.step, "position": 0, "tokens": 0, "updates": foreign.step}
    source = {"kind": foreign.kind, "path": str(foreign.path)}
    return {
        "step": foreign.step,
        "progress": about,
        "recipe": recipe,
        "layout": "",
        "world": 1,
        "source": source,
    }


def write_hf(
    foreign: Foreign, out: Path, dtype: torch.dtype | None, optimizer: bool
) -> None:
    """Write ``foreign`` as a Hugging Face model to the new folder ``out``.

    ``dtype``: type of the written weights. None: as stored; for a Weft run, that of the model from which it started.
    ``optimizer`` has no effect, as the format has no optimizer state.
    """
    if foreign.model.kind == "diffusion":
        from weft.models.diffusers_weights import export_diffusers

        values = {name: foreign.read(name, dtype) for name in foreign.table}
        export_diffusers(foreign.model, values, out)
        return
    if foreign.kind == "weft" or "quantization_config" in carried_config(foreign.files):
        # A run keeps float32 of what began in 16 bits, and 8 bits are read as float32.
        dtype = dtype or exported_dtype(None, foreign.files)
    itemsize = (dtype or foreign.sources[TYPICAL].dtype).itemsize
    largest = max(row.numel for row in foreign.table.values()) * itemsize
    export(lambda name: foreign.read(name, dtype), foreign.model, out, dtype, foreign.files, foreign.length,
           max(FILE_BYTES, largest))  # fmt: skip


class _Lazy(dcp.DefaultSavePlanner):
    """DCP's planner for tensors on the meta device. Each tensor is created when it is written, and written in pieces of
    rows, as torch.save copies what it writes.
    """

    def __init__(self, make: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self.make, self.held, self.values = make, "", torch.empty(0)

    def create_local_plan(self) -> dcp.SavePlan:
        items, plan = [], super().create_local_plan()
        for item in plan.items:
            assert item.tensor_data is not None
            size, width = (
                item.tensor_data.size,
                item.tensor_data.properties.dtype.itemsize,
            )
            rows = max(1, CHUNK // max(1, size[1:].numel() * width))
            for lo in range(0, size[0], rows):
                offsets = torch.Size([lo, *[0] * (len(size) - 1)])
                box = ChunkStorageMetadata(
                    offsets, torch.Size([min(rows, size[0] - lo), *size[1:]])
                )
                items.append(replace(item, type=WriteItemType.SHARD, index=replace(item.index, offset=offsets),
                                     tensor_data=replace(item.tensor_data, chunk=box)))  # fmt: skip
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        if self.held != write_item.index.fqn:
            self.values = torch.empty(0)  # gone before the next one is made
            self.values, self.held = (
                self.make(write_item.index.fqn),
                write_item.index.fqn,
            )
        assert write_item.tensor_data is not None
        lo, rows = (
            write_item.tensor_data.chunk.offsets[0],
            write_item.tensor_data.chunk.sizes[0],
        )
        return self.values[lo : lo + rows]


def export_dcp(
    foreign: Foreign,
    out: Path,
    dtype: torch.dtype | None = None,
    optimizer: bool = True,
) -> None:
    """Write ``foreign`` as a PyTorch DCP checkpoint with Hugging Face's names to the new folder ``out``.

    No process group is needed. ``dtype``: type of the written weights (None: as stored). With ``optimizer`` moments are
    written, too, as ``optimizer.state.NAME.exp_avg`` and ``optimizer.state.NAME.exp_avg_sq``.
    """
    wanted: dict[str, tuple[_Output, int | None]] = {}
    empty = {}
    for output in _plan(foreign, dtype, optimizer).values():
        of_experts, kept = (
            ".experts." in output.parameter,
            TORCH_DTYPES[output.about.dtype],
        )
        for number, theirs in enumerate(hf_names(output.parameter, foreign.model)):
            theirs = (
                f"optimizer.state.{theirs}.{output.moment}" if output.moment else theirs
            )
            wanted[theirs] = (output, number if of_experts else None)
            empty[theirs] = torch.empty(
                output.about.shape[of_experts:], dtype=kept, device="meta"
            )

    def whole(output: _Output) -> torch.Tensor:
        values = output.read(foreign)
        return (
            values
            if output.moment
            else as_hf(output.parameter, values, foreign.model).to(values.dtype)
        )

    experts = lru_cache(maxsize=1)(whole)

    def make(theirs: str) -> torch.Tensor:
        output, expert = wanted[theirs]
        return whole(output) if expert is None else experts(output)[expert]

    config = exported_config(
        foreign.model,
        dtype or foreign.sources[TYPICAL].dtype,
        foreign.files,
        foreign.length,
    )
    try:
        with new_folder(out) as draft:
            writer = dcp.FileSystemWriter(
                draft, thread_count=1, per_thread_copy_ahead=0
            )
            dcp.save(empty, storage_writer=writer, planner=_Lazy(make), no_dist=True)
            (draft / CONFIG).write_bytes(as_json(config))
    except dcp.api.CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise (
            first
            if isinstance(first, WeftError)
            else WeftError(f"cannot write {out}: {first}")
        ) from None


def write_gguf(
    foreign: Foreign, out: Path, dtype: torch.dtype | None, optimizer: bool
) -> None:
    """Write ``foreign`` as a GGUF file to ``out``.

    ``out``: the file, if its name ends in ``.gguf``, else a new folder for the file. ``dtype``: type of the written
    weights (None: the type in the model's ``config.json``, without one as stored). ``optimizer`` has no effect, as the
    format has no optimizer state.
    """
    kept = str(
        dtype or exported_dtype(None, foreign.files) or foreign.sources[TYPICAL].dtype
    ).removeprefix("torch.")
    kind = kept if kept in KINDS else "float32"
    export_gguf(
        lambda name: foreign.read(name, dtype),
        foreign.model,
        out,
        kind,
        foreign.files,
        foreign.length,
    )


WRITERS: dict[str, Callable[[Foreign, Any, torch.dtype | None, bool], None]] = {
    "weft": write_weft,
    "hf": write_hf,
    "dcp": export_dcp,
    "gguf": write_gguf,
}
