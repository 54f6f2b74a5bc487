"""Read a GGUF file: the model that its fields describe, and its tensors, which are dequantised on demand."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from weft.checkpoint.convert.rules import Shard
from weft.checkpoint.convert.shards import ByteRun, read_runs
from weft.errors import WeftError
from weft.models.rope import frequencies
from weft.recipe import ModelShape, RopeScaling
from weft.shapes import config

#: Architectures as GGUF names them (``llama`` is Mistral's and SmolLM's too), and as Hugging Face does.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}  # fmt: skip
#: Fields of :class:`ModelShape` by what comes after the architecture in GGUF's, and those that a file must have.
FIELDS = {
    "layers": "block_count",
    "embed": "embedding_length",
    "ffn": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "window": "attention.sliding_window",
    "window_theta": "rope.freq_base_swa",
}
NEEDED = ("layers", "embed", "ffn", "heads", "norm_eps")
#: Defaults of sampling that a file may have, by what ``generation_config.json`` calls them.
SAMPLING = {
    "general.sampling.temp": "temperature", "general.sampling.top_k": "top_k", "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p", "general.sampling.penalty_repeat": "repetition_penalty",
}  # fmt: skip
#: Llama 3's scaling in Weft's own words, beside the divisors that follow from it, which need not show all of it.
LLAMA3 = "weft.rope_scaling"


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, list[Shard]]]:
    """Return the metadata fields of a GGUF file by name, and its tensors by name, each as a list of one shard.

    Values of tensors are read later, on demand. Raises :class:`WeftError` if the file is damaged or the package
    ``gguf`` is missing.
    """
    try:
        import gguf

        reader = gguf.GGUFReader(file)
        fields = {name: _value(item) for name, item in reader.fields.items()}
        tensors: dict[str, list[Shard]] = {
            item.name: [_dequantised(file, item)] for item in reader.tensors
        }
    except ImportError:
        raise WeftError(
            "reading GGUF needs the package gguf; pip install 'weft[gguf]'"
        ) from None
    except Exception as error:  # whatever a damaged file makes of its own sizes
        raise WeftError(
            f"{file} is not a whole GGUF file: {str(error)[:120] or type(error).__name__}"
        ) from None
    return fields, tensors


def _value(field: Any) -> Any:
    """Return a field's value: of a float32 the shortest number that is it, 1e-5 and not 9.99999974e-06."""
    value = field.contents()
    return (
        float(str(np.float32(value)))
        if isinstance(value, float) and field.types[0].name == "FLOAT32"
        else value
    )


def gguf_shape(
    file: Path, fields: Mapping[str, Any], tensors: Mapping[str, list[Shard]]
) -> ModelShape:
    """Return the shape of the model that a GGUF file describes.

    ``file``: the file's path, for error messages; ``fields`` and ``tensors``: its contents from :func:`read_gguf`.
    Raises :class:`WeftError` if Weft does not support the model.
    """
    arch = str(fields.get("general.architecture"))
    about = {
        name.removeprefix(f"{arch}."): value
        for name, value in fields.items()
        if name.startswith(f"{arch}.")
    }
    about |= {LLAMA3: fields[LLAMA3]} if LLAMA3 in fields else {}
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise WeftError(
            f"{file}: architecture {arch!r} is not supported: {config.lacking(about)}; Weft has {known}"
        )
    if about.get("expert_count"):
        raise WeftError(
            f"{file}: architecture {arch!r} with experts is not supported: {config.lacking(about)}"
        )
    try:
        sizes = {ours: about[name] for ours, name in FIELDS.items() if name in about}
        embed = about["embedding_length"]
        tree = {
            **config.ARCHITECTURES[ARCHITECTURES[arch]][1],
            "vocab": tensors["token_embd.weight"][0].shape[0],
            "tied": "output.weight" not in tensors,
            "head_dim": embed // about["attention.head_count"],
            "rope_theta": 1e6 if arch == "gemma3" else 1e4,
            **{name: about[FIELDS[name]] for name in NEEDED},
            **sizes,
        }
        if arch == "gemma3":
            tree |= {"activation": "gelu", "full_every": 6}
            tree["window_theta"] = about.get(FIELDS["window_theta"], 1e4)
            # The one size whose queries are not scaled by head_dim; GGUF does not say it.
            tree["query_dim"] = (
                embed / tree["heads"] if tree["layers"] == 62 else tree["head_dim"]
            )
        shape = ModelShape.model_validate(tree)
        scaling = _scaling(file, about, shape, tensors)
        return shape.model_copy(update={"rope_scaling": scaling})
    except (KeyError, TypeError, ZeroDivisionError, ValidationError) as error:
        raise WeftError(
            f"{file} does not describe a model: {str(error).splitlines()[0]}"
        ) from None


def _scaling(
    file: Path,
    about: Mapping[str, Any],
    shape: ModelShape,
    tensors: Mapping[str, list[Shard]],
) -> RopeScaling | None:
    """Return the scaling of rotary frequencies: linear by its fields, Llama 3's by the stored divisors."""
    kind, factor = (
        about.get("rope.scaling.type", "none"),
        about.get("rope.scaling.factor", 1.0),
    )
    if kind == "linear" and "rope_freqs.weight" not in tensors:
        return RopeScaling(kind="linear", factor=factor)
    if "rope_freqs.weight" in tensors and kind in ("none", "llama3"):
        (stored,) = tensors["rope_freqs.weight"]
        divisors = stored.read(0, stored.shape[0]).double()
        scaling = RopeScaling(factor=float(str(np.float32(divisors.max()))))
        if said := about.get(LLAMA3):
            scaling = RopeScaling.model_validate_json(said)
        own = frequencies(shape) / frequencies(
            shape.model_copy(update={"rope_scaling": scaling})
        )
        if own[0].shape == divisors.shape and torch.allclose(
            own[0], divisors, rtol=1e-4
        ):
            return scaling
    elif kind == "none":
        return None
    raise WeftError(
        f"{file} has RoPE scaling and does not say all of it; give the model's config.json with --config"
    )


def _dequantised(file: Path, tensor: Any) -> Shard:
    shape, kind = tuple(int(n) for n in tensor.shape[::-1]), tensor.tensor_type
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind.name, torch.float32)

    def read(lo: int, hi: int) -> torch.Tensor:
        from gguf.quants import dequantize

        line = int(tensor.n_bytes) // shape[0]
        raw = torch.empty(hi - lo, line, dtype=torch.uint8)
        read_runs(
            [ByteRun(file, int(tensor.data_offset) + lo * line, raw.numel())],
            tensor.name,
            raw,
        )
        if kind.name in ("F32", "F16", "BF16"):
            return raw.view(dtype).view(hi - lo, *shape[1:])
        try:
            return torch.from_numpy(dequantize(raw.numpy(), kind)).view(
                hi - lo, *shape[1:]
            )
        except NotImplementedError:
            raise WeftError(
                f"{file}: tensor {tensor.name} is {kind.name}, which gguf cannot dequantise"
            ) from None

    return Shard(shape, dtype, read)
