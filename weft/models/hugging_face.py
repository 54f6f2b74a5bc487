"""Reading and writing of Hugging Face folders: safetensors of all models that :mod:`weft.shapes.config` knows."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from weft.errors import WeftError
from weft.layout.dims import Box, Logical, extents, slices
from weft.layout.mesh import Mesh
from weft.models.sparse_matrix import (
    OFFSETS,
    PARTS,
    VALUES,
    SparseMatrix,
    dense_rows,
    sparse_matrix,
)
from weft.models.transformer import Transformer
from weft.new_folder import new_folder
from weft.recipe import ModelShape
from weft.recipe.named_templates import with_named_templates
from weft.shapes.carried_files import (
    CONFIG,
    GENERATION,
    TOKEN_IDS,
    as_json,
    carried_dtype,
    exported_config,
)
from weft.shapes.config import weight_blocks
from weft.shapes.config_fields import read_json
from weft.shapes.foreign_names import fused_name, hf_names, norm_offset
from weft.shapes.parameters import whole_table

T = torch.Tensor

AGAIN = "download or export the model again"
#: The tensor whose type counts as the model's: scales of norms may be wider.
TYPICAL = "blocks.0.attention.wo"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Ending of the name of the scales of a weight in 8 bits.
SCALES = "_scale_inv"
TOKENIZER_FILES = rf".*token.*\.json|tokenizer\.model|vocab\.json|merges\.txt|chat_template\.jinja|{GENERATION}"


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of the tokenizer's files in a Hugging Face folder, by name.

    An old folder may have the ids of special tokens only in its ``config.json``. The result then has a
    ``generation_config.json`` that is made from them.
    """
    files = {
        p.name: p.read_bytes()
        for p in sorted(folder.iterdir())
        if re.fullmatch(TOKENIZER_FILES, p.name)
    }
    files = with_named_templates(files, folder)
    if GENERATION not in files and (folder / "config.json").is_file():
        config = read_json(folder / "config.json", AGAIN)
        if tokens := {
            key: config[key] for key in TOKEN_IDS if config.get(key) is not None
        }:
            files[GENERATION] = as_json(tokens)
    return files


def files_beside(config: Path) -> dict[str, bytes]:
    """Return the contents of a model's files that hold no weights, by name.

    These files are ``config`` (a path to ``config.json``) and the tokenizer's files in the same folder. Raises
    :class:`WeftError` if a file cannot be read.
    """
    try:
        return tokenizer_files(config.parent) | {CONFIG: config.read_bytes()}
    except OSError as error:
        raise WeftError(
            f"cannot read {error.filename}: {error.strerror}; {AGAIN}"
        ) from None


def as_hf(name: str, values: T, shape: ModelShape) -> T:
    """Return the values that Hugging Face stores for Weft's parameter ``name`` with ``values``. ``shape``: shape of the
    model.

    Only some models' norms differ, by a constant (:func:`norm_offset`).
    """
    return _shifted(values, -norm_offset(name, shape))


def _shifted(values: T, offset: float) -> T:
    if not offset:
        return values
    return values.to(torch.promote_types(values.dtype, torch.float32)) + offset


#: The output layer.
HEAD = "lm_head.weight"


class HuggingFaceFolder:
    """Reader of tensors in a Hugging Face folder, which reads only the requested box of each tensor.

    ``folder``: the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.indexed = folder, (folder / INDEX).is_file()
        self.readers: dict[str, Any] = {}  # open files
        if self.indexed:
            self.files: dict[str, str] = (
                read_json(folder / INDEX, AGAIN).get("weight_map") or {}
            )
        elif not (folder / SINGLE).is_file():
            raise WeftError(
                f"{folder} has neither {SINGLE} nor {INDEX}; give a folder with safetensors weights"
            )
        else:
            self.files = dict.fromkeys(self.reader(SINGLE).keys(), SINGLE)

    @cached_property
    def weight_blocks(self) -> list[int]:
        """Rows and columns of the blocks of a weight that share a scale, as a list of two numbers.

        The list is empty if the weights are not quantised.
        """
        return weight_blocks(
            self.folder / "config.json", read_json(self.folder / "config.json", AGAIN)
        )

    def reader(self, file: str) -> Any:
        """Return a safetensors file of the folder, opened at the first call. Files are closed with the object.

        Raises :class:`WeftError` if it is missing or damaged.
        """
        if file in self.readers:
            return self.readers[file]
        try:
            self.readers[file] = safe_open(self.folder / file, "pt")
            return self.readers[file]
        except (OSError, SafetensorError) as error:
            raise WeftError(
                f"{self.folder / file} is missing or damaged ({error}); {AGAIN}"
            ) from None

    def find(self, name: str, shape: Sequence[int]) -> Any:
        """Return a safetensors handle of the tensor with Hugging Face's ``name``, without reading its data.

        Raises :class:`WeftError` if there is no tensor of this name, or if its shape is not ``shape``.
        """
        if name not in self.files or name not in self.reader(self.files[name]).keys():  # noqa: SIM118 (no dictionary)
            hint = (
                "set model.tied = true"
                if name == HEAD
                else "the model section is not of the model stored there, or a part of it is missing"
            )
            raise WeftError(
                f"{self.folder / (INDEX if self.indexed else SINGLE)} has no tensor {name}; {hint}"
            )
        file = self.folder / self.files[name]
        tensor = self.reader(self.files[name]).get_slice(name)
        if tuple(tensor.get_shape()) != tuple(shape):
            shapes = f"has shape {tensor.get_shape()} but the model needs {list(shape)}"
            raise WeftError(
                f"{file}: {name} {shapes}; the model section is not of the model stored there"
            )
        return tensor

    def read(self, name: str, shape: Sequence[int], box: Box) -> T:
        """Read and return the rectangle ``box`` of the tensor with Hugging Face's ``name``, whose whole shape is
        ``shape``.
        """
        if name + VALUES in self.files:
            return self._of_bits(name, shape, box)
        tensor, file = self.find(name, shape), self.folder / self.files[name]
        if tensor.get_dtype() == "F8_E4M3" and len(box) == 2:
            return self._of_bytes(name, tensor, box)
        if tensor.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise WeftError(
                f"{file}: {name} is stored as {tensor.get_dtype()}; quantized weights are not supported"
            )
        return tensor[slices(box)]

    def _of_bits(self, name: str, shape: Sequence[int], box: Box) -> T:
        """Return the part ``box`` of a weight that is stored as a bitmap and values, with its zeros."""
        (first, last), (low, high) = box
        rows, columns = shape
        offsets = self.find(name + OFFSETS, (rows + 1,))[first : last + 1]
        bitmap = self.find(name, (rows, -(-columns // 8)))[first:last]
        values = self.reader(self.files[name + VALUES]).get_slice(name + VALUES)
        begin, end = int(offsets[0]), int(offsets[-1])
        kept = SparseMatrix(bitmap, values[begin:end], offsets - begin, columns)
        return dense_rows(kept, 0, last - first)[:, low:high]

    def _of_bytes(self, name: str, tensor: Any, box: Box) -> T:
        """Return the part ``box`` of a weight in 8 bits, whose blocks have a scale each (DeepSeek-V3), as float32."""
        if not (sizes := self.weight_blocks):
            raise WeftError(f"{self.folder}/config.json has no quantization_config, which says what the 8 bits of "
                            f"{name} mean; {AGAIN}")  # fmt: skip
        blocks = tuple(
            (lo // size, -(-hi // size))
            for (lo, hi), size in zip(box, sizes, strict=True)
        )
        counts = [
            -(-n // size) for n, size in zip(tensor.get_shape(), sizes, strict=True)
        ]
        scale = self.read(name + SCALES, counts, blocks)
        for dim, ((lo, hi), (first, _), size) in enumerate(
            zip(box, blocks, sizes, strict=True)
        ):
            scale = scale.repeat_interleave(size, dim).narrow(
                dim, lo - first * size, hi - lo
            )
        return tensor[slices(box)].to(torch.float32) * scale

    def experts(self, name: str, names: Sequence[str], logical: Logical, box: Box) -> T:
        """Read and return the rectangle ``box`` of a stack of experts' weights ``[experts, ...]``, from a tensor per
        expert or one fused tensor.

        ``name``: Weft's name of the stack; ``names``: Hugging Face's names of the experts' tensors; ``logical``: the
        whole stack.
        """
        count, rows, width = logical.shape
        fused = fused_name(name)
        if fused is not None and fused[0] in self.files:
            whole, part, parts = fused
            (lo, hi), first = box[1], part * rows
            return self.read(
                whole,
                (count, parts * rows, width),
                (box[0], (first + lo, first + hi), box[2]),
            )
        tensors = [
            self.read(name_of_expert, (rows, width), box[1:])
            for name_of_expert in names[slice(*box[0])]
        ]
        return torch.stack(tensors) if tensors else torch.empty(extents(box))


def hf_values(
    folder: Path, shape: ModelShape | None = None
) -> Callable[[str, Logical, Box], T]:
    """Return a function that reads initial values from the safetensors of ``folder``.

    The function takes a parameter's name, its whole tensor and a box, reads only this box, and can be given to
    :func:`weft.parallel.build.parallelize`. ``shape``: shape of the model, on which the names of the tensors depend;
    None: the names that most models use.
    """
    stored = HuggingFaceFolder(folder)

    def values(name: str, logical: Logical, box: Box) -> T:
        names = hf_names(name, shape)
        if not names:
            return torch.zeros(extents(box))
        if ".experts." in name:
            return stored.experts(name, names, logical, box)
        value = stored.read(names[0], logical.shape, box)
        return _shifted(value, norm_offset(name, shape))

    return values


def check_stored(folder: Path, shape: ModelShape) -> None:
    """Check that ``folder`` has all tensors of a model of ``shape``, no further experts, and no output layer of its own
    if that is tied. Hardly any data are read.

    Raises :class:`WeftError` if it does not.
    """
    stored = HuggingFaceFolder(folder)
    files = stored.files
    for name, row in whole_table(shape).items():
        fused = fused_name(name)
        names = [] if fused is not None and fused[0] in files else hf_names(name, shape)
        missing = [tensor_name for tensor_name in names if tensor_name not in files]
        scales = [tensor_name + SCALES for tensor_name in names]
        if not files.keys().isdisjoint(scales):
            missing += [scale for scale in scales if scale not in files]
        if missing and len(names) > 1:
            some = f"{len(names) - len(missing)} of {len(names)} experts"
            raise WeftError(
                f"{folder} has {some} for {name}: {missing[0]} is missing; {AGAIN}"
            )
        if missing:
            hint = (
                "set model.tied = true"
                if name == "head"
                else f"its config.json is of another model, or {AGAIN}"
            )
            raise WeftError(
                f"{folder} has no tensor {missing[0]} {list(row.shape)}; {hint}"
            )
        if name.endswith("router.table"):  # of more experts all would be found
            stored.find(names[0], row.shape)
    if shape.tied and HEAD in files:
        _check_tied(stored, shape)


def _check_tied(stored: HuggingFaceFolder, shape: ModelShape) -> None:
    """Raise :class:`WeftError` if the folder has an output layer that is not the embedding, although both are tied."""
    size = whole_table(shape)["embedding.table"].shape
    (embedding,) = hf_names("embedding.table", shape)
    rows, width = size
    for row in range(0, rows, max(1, rows // 16)):
        box = ((row, row + 1), (0, width))
        own, head = (stored.read(name, size, box) for name in (embedding, HEAD))
        if not torch.equal(own, head):
            raise WeftError(
                f"{stored.folder} has a {HEAD} of its own, and its config.json says tie_word_embeddings = true; say "
                "false there if the model was trained with it, or take it out"
            )


def exported_dtype(asked: str | None, files: Mapping[str, bytes]) -> torch.dtype | None:
    """Return the type in which weights are exported: ``asked``, or else the type in the model's ``config.json``.

    ``files``: contents of the model's files, by name. The result is None if neither names a type; weights then keep the
    type in which they are stored.
    """
    name = asked or carried_dtype(files)
    if name in ("float64", "float32", "bfloat16", "float16"):
        return getattr(torch, name)
    return None


def export(
    values: Mapping[str, T] | Callable[[str], T], shape: ModelShape, folder: Path,
    dtype: torch.dtype | None = None, files: Mapping[str, bytes] | None = None,
    max_positions: int | None = None, max_file_bytes: int = 4 << 30, sparse: Collection[str] = (),
) -> None:  # fmt: skip
    """Write a model to ``folder`` as transformers reads it. The folder must be new or empty.

    Raises :class:`WeftError` if the folder cannot be written. It appears when it is complete, or not at all.

    Args:
        ``values``: whole tensors by Weft's names, or a function that returns the tensor of a name.
        ``shape``: shape of the model.
        ``folder``: the folder.
        ``dtype``: type to store; None: the type of each tensor.
        ``files``: contents of the tokenizer's files and of the model's ``config.json``, by name.
        ``max_positions``: context length in tokens to write into ``config.json``, if ``files`` has no ``config.json``.
        ``max_file_bytes``: largest size of a file; the tensors of one file are in memory at a time.
        ``sparse``: Weft's names of matrices that are written as a bitmap and values, which Weft alone reads.
    """
    with new_folder(folder) as draft:
        get = values.__getitem__ if isinstance(values, Mapping) else values
        config = exported_config(
            shape, dtype or get(TYPICAL).dtype, files or {}, max_positions
        )
        files = {GENERATION: b"{}\n"} | {
            n: c for n, c in (files or {}).items() if re.fullmatch(TOKENIZER_FILES, n)
        }
        try:
            _write_tensors(get, shape, draft, dtype, max_file_bytes, sparse)
        except SafetensorError as error:
            raise WeftError(f"cannot write {folder.absolute()}: {error}") from None
        for name, content in (files | {CONFIG: as_json(config)}).items():
            (draft / name).write_bytes(content)
        mode = (draft / CONFIG).stat().st_mode
        for file in draft.iterdir():
            # safetensors makes its files readable for their owner only
            file.chmod(mode)


def _write_tensors(
    get: Callable[[str], T],
    shape: ModelShape,
    folder: Path,
    dtype: torch.dtype | None,
    limit: int,
    sparse: Collection[str],
) -> None:
    """Write all tensors, in files of at most ``limit`` bytes, with an index if one file cannot hold them."""
    described = Transformer(shape, Mesh.single()).logical_parameters()
    logical = {name: row for name, row in described if hf_names(name, shape)}
    kept = get(TYPICAL).dtype
    width = (dtype or kept).itemsize
    groups: list[list[str]] = [[]]
    for name in logical:
        size = width * sum(logical[n].numel for n in [*groups[-1], name])
        if groups[-1] and size > limit:
            groups.append([])
        groups[-1].append(name)
    index: dict[str, str] = {}
    total = 0
    for i, names in enumerate(groups, 1):
        file = SINGLE
        if len(groups) > 1:
            file = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        # here, so that the last file's are gone before these are made
        tensors: dict[str, T] = {}
        for name in names:
            # What is chosen by must not be rounded: it decides between experts that are all but equal.
            kind = torch.float32 if name.endswith("router.bias") else dtype or kept
            tensor = as_hf(name, get(name).detach(), shape).to("cpu", kind).contiguous()
            if tensor.shape != logical[name].shape:
                raise WeftError(
                    f"cannot export {name}: shape {list(tensor.shape)} is not {list(logical[name].shape)}"
                )
            theirs = hf_names(name, shape)
            if name in sparse:
                parts = zip(PARTS, sparse_matrix(tensor)[:3], strict=True)
                tensors |= {f"{theirs[0]}{part}": x for part, x in parts}
                continue
            tensors |= dict(
                zip(theirs, tensor if ".experts." in name else [tensor], strict=True)
            )
        total += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    if len(groups) > 1:
        about = {"total_size": total}
        (folder / INDEX).write_text(
            json.dumps({"metadata": about, "weight_map": index}, indent=2) + "\n"
        )
