"""Adapters as PEFT has them: ``adapter_model.safetensors`` and ``adapter_config.json`` in a folder, in and out."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from weft.errors import WeftError
from weft.layout.dims import Box, Logical, slices
from weft.layout.mesh import Mesh
from weft.model_config import read_json
from weft.model_parameters import (
    ADAPTERS,
    PROJECTIONS,
    adapter_alpha,
    adapter_rank,
    adapter_scale,
    is_target,
    projections,
)
from weft.models.adapters import base_weight
from weft.models.hf import TOKENIZER_FILES
from weft.models.hf_names import hf_name
from weft.models.row_adapters import HostAdapter, laid_out, layer_modules
from weft.models.transformer import Transformer
from weft.models.values import Values
from weft.new_folder import new_folder
from weft.recipe import Adapter, ModelShape

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MODULES = {"self_attn": "attention", "mlp": "ffn"}
PARTS = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
#: Settings of PEFT's that change what an adapter computes, and the values with which it is one of ours.
ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "fan_in_fan_out": (False,), "modules_to_save": (None, []),
    "layer_replication": (None,), "trainable_token_indices": (None,),
    "lora_bias": (False,), "target_parameters": (None, []), "alora_invocation_tokens": (None,), "use_qalora": (False,),
}  # fmt: skip
#: Weights that generation multiplies with others beforehand, so that an adapter's output cannot be added to theirs.
ABSORBED = ("wkv_b",)


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def peft_name(name: str) -> str:
    """What PEFT calls the parameter ``name`` of an adapter."""
    module = hf_name(base_weight(name)).removesuffix(".weight")
    return f"base_model.model.{module}.{PARTS[name.rpartition('.')[2]]}"


class PeftAdapter:
    """An adapter's folder, opened. Raises :class:`WeftError` if it is damaged or of a kind that Weft does not compute.

    ``adapter``: its settings, whose targets are just the weights that it has tensors for; ``base``: the name of the
    model that it is for, if it says so.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = read_json(folder / CONFIG, "give a folder that PEFT has saved an adapter to")
        for field, known in ONLY.items():
            if config.get(field, known[0]) not in known:
                raise WeftError(f"{folder / CONFIG}: {field} = {config[field]!r} is not supported; {known[0]!r} is")
        self.base: str | None = config.get("base_model_name_or_path")
        try:
            with safe_open(folder / TENSORS, "pt") as file:
                self.sizes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            targets, rank, alpha = self._targets(), config["r"], config["lora_alpha"]
            ranks = {path: self.sizes[name][0] for path, name in targets.items()}
            alphas = {path: _of_pattern(config.get("alpha_pattern"), name, alpha) for path, name in targets.items()}
            self.adapter = Adapter(
                kind="dora" if config.get("use_dora") else "lora", rank=rank, alpha=alpha,
                rank_stabilised=bool(config.get("use_rslora")), targets=tuple(targets),
                rank_pattern={path: own for path, own in ranks.items() if own != rank},
                alpha_pattern={path: own for path, own in alphas.items() if own != alpha},
                dropout=config.get("lora_dropout") or 0.0,
            )  # fmt: skip
        except (OSError, SafetensorError) as error:
            raise WeftError(f"{folder / TENSORS} is missing or damaged ({error}); save the adapter again") from None
        except (KeyError, ValueError) as error:
            raise WeftError(f"{folder / CONFIG} has no usable {str(error).splitlines()[0]}") from None

    def _targets(self) -> dict[str, str]:
        """The paths of the weights that the adapter has tensors for, each with the name of the first factor."""
        found = {}
        ours = {f"{module}.{theirs}": f"{module}.{ours}" for module, names in PROJECTIONS.items()
                for ours, theirs in names.items()}  # fmt: skip
        for name in self.sizes:
            if name.endswith(PARTS["a"]):
                layer, module, theirs = ["", "", *name.removesuffix("." + PARTS["a"]).split(".")][-3:]
                known = ours.get(f"{MODULES.get(module)}.{theirs}")
                if known is None:
                    raise WeftError(f"{self.folder / TENSORS} adapts {theirs}, which Weft has no adapter for")
                found[f"blocks.{layer}.{known}"] = name
        return found

    def tensor(self, name: str) -> torch.Tensor:
        """What is stored under PEFT's ``name``."""
        with safe_open(self.folder / TENSORS, "pt") as file:
            return file.get_tensor(name)

    def values(self, shape: ModelShape) -> Values:
        """The values of the adapter's parameters in ``shape``; :class:`WeftError` if it is for another model."""
        wanted = {name: logical for name, logical in Transformer(shape, Mesh.single()).logical_parameters()
                  if ADAPTERS in name}  # fmt: skip
        named = {peft_name(name): name for name in wanted}
        for theirs in (*named, *self.sizes):
            needed = wanted[named[theirs]].shape if theirs in named else None
            if (found := self.sizes.get(theirs)) != needed:
                raise WeftError(
                    f"{self.folder} is an adapter for another model: {theirs} is {found or 'missing'} there, and here "
                    f"{needed or 'there is no such weight'}; give the model for which it was trained"
                )
        file = safe_open(self.folder / TENSORS, "pt")

        def values(name: str, logical: Logical, box: Box) -> torch.Tensor:
            return file.get_slice(peft_name(name))[slices(box)]

        return values


def _of_pattern(pattern: Mapping[str, Any] | None, name: str, usual: Any) -> Any:
    """What PEFT's ``pattern`` (``alpha_pattern``) gives for the tensor ``name``: of the first expression that fits."""
    module = name.removeprefix("base_model.model.").removesuffix("." + PARTS["a"])
    fitting = (value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(fitting, usual)


def write_adapter(
    tensors: Mapping[str, torch.Tensor], shape: ModelShape, base: str | None, folder: Path,
    files: Mapping[str, bytes] | None = None,
) -> None:  # fmt: skip
    """Write the adapter's ``tensors`` (by Weft's names) as PEFT reads them, with the tokenizer's ``files``.

    ``base`` names the model that they are for.
    """
    adapter = shape.adapter
    assert adapter is not None
    paths = [p for p in projections(shape) if any(is_target(t, p) for t in adapter.targets)]
    named = {path: hf_name(path).removesuffix(".weight") for path in paths}
    short = {p.rpartition(".")[2] for p in paths}
    if sum(p.rpartition(".")[2] in short for p in projections(shape)) == len(paths):
        modules = sorted({hf_name(p).split(".")[-2] for p in paths})
    else:  # not in every layer
        modules = list(named.values())
    config: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": adapter.rank, "lora_alpha": adapter.alpha, "target_modules": modules,
        "bias": "none", "lora_dropout": adapter.dropout, "use_rslora": adapter.rank_stabilised,
        "use_dora": adapter.kind == "dora", "fan_in_fan_out": False,
        "init_lora_weights": True, "modules_to_save": None,
        "rank_pattern": {n: rank for p, n in named.items() if (rank := adapter_rank(adapter, p)) != adapter.rank},
        "alpha_pattern": {n: alpha for p, n in named.items() if (alpha := adapter_alpha(adapter, p)) != adapter.alpha},
    }  # fmt: skip
    found = {
        peft_name(name): tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if ADAPTERS in name
    }
    with new_folder(folder) as draft:
        (draft / TENSORS).write_bytes(save(found, {"format": "pt"}))
        for name, content in (files or {}).items():
            if re.fullmatch(TOKENIZER_FILES, name):
                (draft / name).write_bytes(content)
        (draft / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def read_adapter(folder: Path, model: Transformer) -> HostAdapter:
    """Read an adapter that PEFT or ``weft export`` wrote, to use it for some rows of a batch of ``model``'s.

    It is the whole adapter, whatever part of ``model`` this rank has (:func:`weft.models.row_adapters.own_part` cuts
    it). Raises :class:`WeftError` if it is not for ``model``.
    """
    if not is_adapter(folder):
        raise WeftError(f"{folder} has no adapter as PEFT writes it; write one with `weft export`")
    peft = PeftAdapter(folder)
    if peft.adapter.kind != "lora":
        raise WeftError(f"{folder} is a {peft.adapter.kind} adapter, which needs the weights themselves; "
                        "serve the model with it merged (`weft export --merge`)")  # fmt: skip
    unread, found = dict(peft.sizes), []
    whole = model if len(model.blocks) == model.shape.layers else Transformer(model.shape, Mesh.single())
    for number, modules in enumerate(layer_modules(whole)):
        factors = []
        for module, weights in modules.items():
            for name in PROJECTIONS.get(module, ()):
                logical = weights.logical.get(name)
                names = [peft_name(f"blocks.{number}.{module}{ADAPTERS}{name}.{part}") for part in "ab"]
                if names[0] not in unread or logical is None or name in ABSORBED:
                    continue
                sizes = [unread.pop(each) for each in names]
                rank = sizes[0][0]
                if sizes != [(rank, logical.shape[1]), (logical.shape[0], rank)]:
                    raise WeftError(f"{folder} is an adapter for another model: {names[0]} and its partner are "
                                    f"{sizes}, and the weight is {tuple(logical.shape)} here")  # fmt: skip
                a, b = (peft.tensor(each) for each in names)
                factors.append((module, name, a, b * adapter_scale(peft.adapter, f"blocks.{number}.{module}.{name}")))
        found.append(laid_out(factors))
    if unread:
        raise WeftError(
            f"{folder} adapts {next(iter(unread))}, which this model does not have, or not where it is read"
        )
    forms, values = zip(*found, strict=True)
    return HostAdapter(forms, values)
