"""Hugging Face folders in and out: safetensors of all that :mod:`weft.model_config` knows, by their own names."""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from weft.errors import WeftError
from weft.layout.dims import Box, Logical
from weft.layout.mesh import Mesh
from weft.model_config import config_from_shape, read_json
from weft.models.transformer import Transformer
from weft.new_folder import new_folder
from weft.recipe import ModelShape

#: Weft's parameter names and Hugging Face's; ``{}`` is the number of the block.
NAMES = {
    "embedding.table": "model.embed_tokens.weight",
    "blocks.{}.attention_norm.scale": "model.layers.{}.input_layernorm.weight",
    **{f"blocks.{{}}.attention.w{x}": f"model.layers.{{}}.self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"blocks.{{}}.attention.b{x}": f"model.layers.{{}}.self_attn.{x}_proj.bias" for x in "qkv"},
    **{f"blocks.{{}}.attention.{x}_norm.scale": f"model.layers.{{}}.self_attn.{x}_norm.weight" for x in "qk"},
    "blocks.{}.ffn_norm.scale": "model.layers.{}.post_attention_layernorm.weight",
    **{f"blocks.{{}}.ffn.{x}": f"model.layers.{{}}.mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    "norm.scale": "model.norm.weight",
    "head": "lm_head.weight",
}  # fmt: skip

#: The names that are others where there are norms after attention and feed-forward (Gemma 3).
FOUR_NORMS = {
    "blocks.{}.attention_out_norm.scale": "model.layers.{}.post_attention_layernorm.weight",
    "blocks.{}.ffn_norm.scale": "model.layers.{}.pre_feedforward_layernorm.weight",
    "blocks.{}.ffn_out_norm.scale": "model.layers.{}.post_feedforward_layernorm.weight",
}

AGAIN = "download or export the model again"
#: A tensor whose type is that of the model: scales of norms may be wider.
TYPICAL = "blocks.0.attention.wq"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
TOKENIZER_FILES = rf".*token.*\.json|tokenizer\.model|vocab\.json|merges\.txt|chat_template\.jinja|{GENERATION}"
TOKEN_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")


def hf_name(name: str, shape: ModelShape | None = None) -> str:
    """What Hugging Face calls the parameter that Weft calls ``name``, in a model of ``shape`` (None: like Llama)."""
    names = NAMES | FOUR_NORMS if shape and shape.norm_after else NAMES
    if name == "head" and shape and shape.output == "score":
        return "score.weight"
    return names[re.sub(r"\d+", "{}", name)].format(*re.findall(r"\d+", name))


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The files of a Hugging Face folder that are about its tokenizer, by name.

    Ids of special tokens, which old folders have in ``config.json`` alone, are always in ``generation_config.json``.
    """
    found = {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if re.fullmatch(TOKENIZER_FILES, p.name)}
    if GENERATION not in found and (folder / "config.json").is_file():
        config = read_json(folder / "config.json", AGAIN)
        if tokens := {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}:
            found[GENERATION] = (json.dumps(tokens, indent=2) + "\n").encode()
    return found


def norm_offset(name: str, shape: ModelShape | None) -> float:
    """What Hugging Face leaves out of the parameter: Gemma 3 stores scales of norms as their difference to one."""
    return 1.0 if shape and shape.norm_after and name.endswith("norm.scale") else 0.0


def as_hf(name: str, values: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """A parameter of Weft's with the values that Hugging Face stores."""
    offset = norm_offset(name, shape)
    return values if not offset else values.to(torch.promote_types(values.dtype, torch.float32)) - offset


def hf_values(folder: Path, shape: ModelShape | None = None) -> Callable[[str, Logical, Box], torch.Tensor]:
    """Values for :func:`weft.parallel.build.parallelize` from safetensors; reads just the box that is asked for."""
    shards: dict[str, str] = {}
    if (folder / INDEX).is_file():
        shards = read_json(folder / INDEX, AGAIN).get("weight_map") or {}
    elif not (folder / SINGLE).is_file():
        raise WeftError(f"{folder} has neither {SINGLE} nor {INDEX}; give a folder with safetensors weights")

    @cache
    def reader(file: Path) -> Any:
        try:
            return safe_open(file, "pt")
        except (OSError, SafetensorError) as error:
            raise WeftError(f"{file} is missing or damaged ({error}); {AGAIN}") from None

    def values(name: str, logical: Logical, box: Box) -> torch.Tensor:
        wanted = hf_name(name, shape)
        file = folder / shards.get(wanted, INDEX if (folder / INDEX).is_file() else SINGLE)
        if file.name == INDEX or wanted not in reader(file).keys():  # noqa: SIM118 (not a dictionary)
            hint = "set model.tied = true" if name == "head" else "the model section is not of the model stored there"
            raise WeftError(f"{file} has no tensor {wanted}; {hint}")
        tensor = reader(file).get_slice(wanted)
        if tuple(tensor.get_shape()) != logical.shape:
            shapes = f"has shape {tensor.get_shape()} but the model needs {list(logical.shape)}"
            raise WeftError(f"{file}: {wanted} {shapes}; the model section is not of the model stored there")
        if tensor.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise WeftError(f"{file}: {wanted} is stored as {tensor.get_dtype()}; quantized weights are not supported")
        found = tensor[tuple(slice(lo, hi) for lo, hi in box)]
        offset = norm_offset(name, shape)
        return found if not offset else found.to(torch.promote_types(found.dtype, torch.float32)) + offset

    return values


def export(
    values: Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor], shape: ModelShape, folder: Path,
    dtype: torch.dtype | None = None, files: Mapping[str, bytes] | None = None,
    max_positions: int = 8192, max_file_bytes: int = 4 << 30,
) -> None:  # fmt: skip
    """Write ``folder`` (new or empty) as transformers reads it; it appears when complete, or not at all.

    ``values`` gives whole tensors by Weft's names; ``dtype`` None keeps theirs. ``files``: those of the tokenizer,
    which come along; ids of special tokens are those of their ``generation_config.json``. Tensors of one file
    (``max_file_bytes``) are held at a time. Raises :class:`WeftError` if the folder cannot be written.
    """
    with new_folder(folder) as draft:
        get = values.__getitem__ if isinstance(values, Mapping) else values
        files = {GENERATION: b"{}\n"} | {n: c for n, c in (files or {}).items() if re.fullmatch(TOKENIZER_FILES, n)}
        tokens = {key: value for key, value in json.loads(files[GENERATION]).items() if key in TOKEN_IDS}
        config = config_from_shape(shape, dtype or get(TYPICAL).dtype, tokens, max_positions)
        try:
            _write_tensors(get, shape, draft, dtype, max_file_bytes)
        except SafetensorError as error:
            raise WeftError(f"cannot write {folder.absolute()}: {error}") from None
        for name, content in (files | {"config.json": (json.dumps(config, indent=2) + "\n").encode()}).items():
            (draft / name).write_bytes(content)
        mode = (draft / "config.json").stat().st_mode
        for file in draft.iterdir():
            file.chmod(mode)  # safetensors makes its files readable for their owner only


def _write_tensors(
    get: Callable[[str], torch.Tensor], shape: ModelShape, folder: Path, dtype: torch.dtype | None, limit: int
) -> None:
    """Write all tensors, in files of at most ``limit`` bytes with an index if one file cannot hold them."""
    logical = dict(Transformer(shape, Mesh.single()).logical_parameters())
    kept = get(TYPICAL).dtype
    width = (dtype or kept).itemsize
    groups: list[list[str]] = [[]]
    for name in logical:
        if groups[-1] and width * sum(logical[n].numel for n in [*groups[-1], name]) > limit:
            groups.append([])
        groups[-1].append(name)
    index: dict[str, str] = {}
    for i, names in enumerate(groups, 1):
        file = f"model-{i:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else SINGLE
        tensors: dict[str, torch.Tensor] = {}  # here, so that the last file's are gone before these are made
        for name in names:
            tensor = as_hf(name, get(name).detach(), shape).to("cpu", dtype or kept).contiguous()
            tensors[hf_name(name, shape)] = tensor
            if tensor.shape != logical[name].shape:
                raise WeftError(f"cannot export {name}: shape {list(tensor.shape)} is not {list(logical[name].shape)}")
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    if len(groups) > 1:
        about = {"total_size": width * sum(one.numel for one in logical.values())}
        (folder / INDEX).write_text(json.dumps({"metadata": about, "weight_map": index}, indent=2) + "\n")
