"""Export a model as a GGUF file for llama.cpp: weights, tokenizer, chat template and settings."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.checkpoint.convert.gguf_file import (
    ARCHITECTURES,
    FIELDS,
    LLAMA3,
    SAMPLING,
    gguf_shape,
)
from weft.checkpoint.convert.rules import Shard
from weft.data.gguf_vocabulary import gguf_vocabulary
from weft.data.tokenizer import tokenizer_from_files
from weft.errors import UsageError, WeftError, why_unwritten
from weft.layout.mesh import Mesh
from weft.models.rope import frequencies
from weft.models.transformer import Transformer
from weft.recipe import ModelShape
from weft.shapes.carried_files import GENERATION, exported_config
from weft.shapes.config import architecture, config_from_shape
from weft.shapes.foreign_names import gguf_name

#: Kinds of weights by the words for them, with GGUF's name and the number of the file's kind.
KINDS = {
    "float32": ("F32", 0),
    "float16": ("F16", 1),
    "bfloat16": ("BF16", 32),
    "q8_0": ("Q8_0", 7),
}
#: GGUF's names of the architectures that Weft reads in it.
NAMES = {name: kind for kind, name in ARCHITECTURES.items()} | {
    "MistralForCausalLM": "llama"
}
#: Elements of a row that share a scale in Q8_0; weights with other rows stay in float16.
BLOCK = 32
#: The largest finite number in float16.
LARGEST = 65504.0


def export_gguf(
    get: Callable[[str], torch.Tensor], shape: ModelShape, out: Path, kind: str, files: Mapping[str, bytes],
    length: int | None = None,
) -> Path:  # fmt: skip
    """Write a model as a GGUF file, and return the file's path.

    ``get`` returns the whole tensor of a given Weft name; ``shape``: shape of the model; ``out``: the new ``.gguf``
    file, or the new folder for it; ``kind``: type of the weights, one of :data:`KINDS`; ``files``: contents of the
    files beside the weights, by name; ``length``: context length in tokens, used if ``files`` give none. Raises
    :class:`UsageError` if ``out`` exists, and :class:`WeftError` for a model or a tokenizer that GGUF cannot describe.
    """
    try:
        import gguf
    except ImportError:
        raise WeftError(
            "writing GGUF needs the package gguf; pip install 'weft[gguf]'"
        ) from None
    file = out if out.suffix == ".gguf" else out / f"{out.name}-{KINDS[kind][0]}.gguf"
    if file.exists() or (out.exists() and out != file):
        raise UsageError(f"--out {out} exists already; choose another name")
    arch, logical = (
        _architecture(shape),
        dict(Transformer(shape, Mesh.single()).logical_parameters()),
    )
    extra = _divisors(shape)
    fields = _fields(arch, shape, files, length)
    _check_said(
        shape,
        arch,
        fields,
        extra,
        {gguf_name(name): of_tensor.shape for name, of_tensor in logical.items()},
    )
    fields |= {"general.name": file.stem, "general.file_type": KINDS[kind][1]}
    if "tokenizer.json" in files:
        fields |= gguf_vocabulary(tokenizer_from_files(files, "the model"), shape.vocab)
    draft = file.with_name(f".{file.name}.part")
    try:
        draft.parent.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(draft, arch)
        if kind == "q8_0":
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for name, value in fields.items():
            _add(writer, name, value)
        planned = {
            name: _kind_of(of_tensor.shape, kind) for name, of_tensor in logical.items()
        }
        for name, theirs in planned.items():
            _announce(writer, gguf_name(name), logical[name].shape, theirs)
        for name, values in extra.items():
            _announce(writer, name, tuple(values.shape), "F32")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, theirs in planned.items():
            writer.write_tensor_data(
                _encoded(name, get(name).detach(), theirs, shape, arch)
            )
        for values in extra.values():
            writer.write_tensor_data(values.float().numpy())
        writer.close()
        draft.rename(file)
    except OSError as error:
        raise WeftError(
            f"cannot write {file}: {why_unwritten(error, 'choose another folder')}"
        ) from None
    finally:
        draft.unlink(missing_ok=True)
    return file


def _architecture(shape: ModelShape) -> str:
    name = architecture(shape)
    if name not in NAMES or shape.output == "score":
        what = (
            "a model that scores"
            if shape.output == "score"
            else name.removesuffix("ForCausalLM")
        )
        known = ", ".join(
            known_name.removesuffix("ForCausalLM") for known_name in NAMES
        )
        raise WeftError(
            f"GGUF is not written of {what}; of {known} it is: leave out --format gguf"
        )
    return NAMES[name]


def _fields(
    arch: str, shape: ModelShape, files: Mapping[str, bytes], length: int | None
) -> dict[str, Any]:
    """Return the fields that describe the model, by name."""
    config = exported_config(shape, "float32", files, length)
    about: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "context_length": int(config["max_position_embeddings"]),
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.head_dim,
        # what is 0 is not there
        **{theirs: getattr(shape, ours) or None for ours, theirs in FIELDS.items()},
    }
    scaling = shape.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        about |= {
            "rope.scaling.type": "linear",
            "rope.scaling.factor": float(scaling.factor),
        }
    fields = {
        f"{arch}.{name}": value for name, value in about.items() if value is not None
    }
    if scaling is not None and scaling.kind == "llama3":
        fields[LLAMA3] = scaling.model_dump_json()
    sampling = json.loads(files.get(GENERATION, b"{}"))
    return fields | {
        theirs: sampling[ours]
        for theirs, ours in SAMPLING.items()
        if sampling.get(ours) is not None
    }


def _divisors(shape: ModelShape) -> dict[str, torch.Tensor]:
    """Return the tensor of divisors of rotary frequencies, if they are scaled as in Llama 3."""
    if shape.rope_scaling is None or shape.rope_scaling.kind != "llama3":
        return {}
    plain = shape.model_copy(update={"rope_scaling": None})
    return {"rope_freqs.weight": (frequencies(plain) / frequencies(shape))[0].float()}


def _check_said(
    shape: ModelShape, arch: str, fields: Mapping[str, Any], extra: Mapping[str, torch.Tensor],
    sizes: Mapping[str, tuple[int, ...]],
) -> None:  # fmt: skip
    """Raise :class:`WeftError` if the file would describe another model, by reading the fields again."""

    def shard(size: tuple[int, ...], values: torch.Tensor | None = None) -> list[Shard]:
        return [
            Shard(
                size,
                torch.float32,
                lambda lo, hi: (
                    torch.zeros(hi - lo) if values is None else values[lo:hi]
                ),
            )
        ]

    tensors = {name: shard(size) for name, size in sizes.items()}
    tensors |= {
        name: shard(tuple(values.shape), values) for name, values in extra.items()
    }
    remedy = "leave out --format gguf"
    if shape.window and arch != "gemma3":
        raise WeftError(
            f"llama.cpp has no windows (model.window = {shape.window}) in its architecture {arch}; {remedy}"
        )
    try:
        again = gguf_shape(
            Path("the file"), {"general.architecture": arch, **fields}, tensors
        )
    except WeftError:
        raise WeftError(
            f"GGUF does not say all of rope_scaling = {shape.rope_scaling!r}; {remedy}"
        ) from None
    own, theirs = (
        config_from_shape(each.model_copy(update={"init_std": 0.02}))
        for each in (shape, again)
    )
    lengths = ("max_position_embeddings",)  # which follow from the scaling
    if wrong := [
        f"{n} = {value!r}"
        for n, value in own.items()
        if theirs.get(n) != value and n not in lengths
    ]:
        settings = ", ".join(ARCHITECTURES)
        raise WeftError(
            f"GGUF has no word for {wrong[0]} in its architecture {arch} (of {settings}); {remedy}"
        )


def _kind_of(size: tuple[int, ...], kind: str) -> str:
    """Return the type of a stored tensor: vectors stay exact, and rows that no block divides stay in float16."""
    if len(size) == 1:
        return "F32"
    return "F16" if kind == "q8_0" and size[-1] % BLOCK else KINDS[kind][0]


def _announce(writer: Any, name: str, size: tuple[int, ...], kind: str) -> None:
    import gguf

    theirs = gguf.GGMLQuantizationType[kind]
    per_block, width = gguf.GGML_QUANT_SIZES[theirs]
    count = int(np.prod(size)) // per_block * width
    writer.add_tensor_info(name, size, np.dtype(np.float32), count, theirs)


def _encoded(
    name: str, values: torch.Tensor, kind: str, shape: ModelShape, arch: str
) -> np.ndarray:
    """Return a tensor's bytes; of queries and keys in the order of rows that llama.cpp rotates."""
    import gguf

    values = values.to("cpu", torch.float32)
    if arch == "llama" and name.endswith((".wq", ".wk")):
        # [heads, halves, pairs, embed]
        heads = values.unflatten(0, (-1, 2, (shape.head_dim or 2) // 2))
        values = heads.transpose(1, 2).flatten(0, 2)
    if kind == "F16" and values.abs().max() > LARGEST:
        raise WeftError(
            f"{name} has numbers that float16 does not reach ({values.abs().max():.3g}); use --dtype bfloat16"
        )
    data: np.ndarray = values.contiguous().numpy()
    if kind in ("F32", "F16"):
        return data.astype(np.float16) if kind == "F16" else data
    encoded: np.ndarray = gguf.quants.quantize(data, gguf.GGMLQuantizationType[kind])
    return encoded


def _add(writer: Any, name: str, value: Any) -> None:
    """A field of the kind that its value has; lists of texts, whole numbers or fractions."""
    number = "int32" if name.startswith("general.sampling.") else "uint32"
    types = {bool: "bool", float: "float32", str: "string", list: "array"}
    if value != []:
        getattr(writer, f"add_{types.get(type(value), number)}")(name, value)
