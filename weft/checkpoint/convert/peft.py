"""Read and write adapters in PEFT's format: a folder with ``adapter_model.safetensors`` and ``adapter_config.json``."""

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
from weft.models.adapters import base_weight
from weft.models.hugging_face import TOKENIZER_FILES
from weft.models.row_adapters import HostAdapter, laid_out, layer_modules
from weft.models.transformer import Transformer
from weft.models.values import Values
from weft.new_folder import new_folder
from weft.recipe import Adapter, ModelShape, VocabularyWeight
from weft.shapes.config_fields import read_json
from weft.shapes.foreign_names import ADAPTED, hf_name, inside_layer
from weft.shapes.parameters import (
    ADAPTERS,
    ROWS,
    VALUE_HEAD,
    VOCABULARY,
    adapter_alpha,
    adapter_rank,
    adapter_scale,
    is_target,
    of_adapter,
    projections,
    row_tokens,
    whole_table,
)

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PARTS = {
    "a": "lora_A.weight",
    "b": "lora_B.weight",
    "magnitude": "lora_magnitude_vector",
}
#: Settings of PEFT's that change what an adapter computes, and the values with which it is one of ours.
ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",), "fan_in_fan_out": (False,),
    "layer_replication": (None,), "lora_bias": (False,), "target_parameters": (None, []),
    "alora_invocation_tokens": (None,), "use_qalora": (False,),
}  # fmt: skip
#: What names end with of rows that learn, of the weight under them and of copies; and what all begin with.
DELTA, UNDER = (
    ".token_adapter.trainable_tokens_delta",
    ".token_adapter.base_layer.weight",
)
COPIES, BEFORE = (
    (".modules_to_save.weight", ".original_module.weight"),
    "base_model.model.",
)
#: Weights that generation multiplies with others beforehand, so that an adapter's output cannot be added to theirs.
ABSORBED = ("wkv_b",)


def is_adapter(folder: Path) -> bool:
    """Return whether ``folder`` holds an adapter in PEFT's format."""
    return (folder / CONFIG).is_file()


def peft_name(name: str) -> str:
    """Convert Weft's name of an adapter's parameter to the name that PEFT's format uses."""
    if name in VOCABULARY.values():
        return BEFORE + hf_name(name)
    module = hf_name(base_weight(name)).removesuffix(".weight")
    return f"{BEFORE}{module}{DELTA if name in ROWS.values() else '.' + PARTS[name.rpartition('.')[2]]}"


class PeftAdapter:
    """Adapter read from a folder in PEFT's format.

    Raises :class:`WeftError` if the folder is damaged or Weft does not support this kind of adapter.

    Attributes:
        ``adapter``: settings of the adapter; the targets are the weights for which the folder has tensors.
        ``base``: name of the base model, or None if the folder does not name one.
        ``sizes``: shape of each tensor, by PEFT's name.
        ``tokens``: ids of the tokens whose rows of embedding or output layer are trained.
        ``placed``: weights that have grown with the vocabulary, by PEFT's name. Such a weight is stored as two tensors,
            the base weight and its trained rows. The value is a triple: the names of both tensors, and the token ids of
            the rows.
        ``orders``: for each tensor of trained rows, the permutation that sorts the rows by token id.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = read_json(
            folder / CONFIG, "give a folder that PEFT has saved an adapter to"
        )
        for field, known in ONLY.items():
            if config.get(field, known[0]) not in known:
                raise WeftError(
                    f"{folder / CONFIG}: {field} = {config[field]!r} is not supported; {known[0]!r} is"
                )
        self.base: str | None = config.get("base_model_name_or_path")
        try:
            with safe_open(folder / TENSORS, "pt") as file:
                self.sizes = {
                    name: tuple(file.get_slice(name).get_shape())
                    for name in file.keys()  # noqa: SIM118 (no dictionary)
                }
            targets, rank, alpha = self._targets(), config["r"], config["lora_alpha"]
            ranks = {path: self.sizes[name][0] for path, name in targets.items()}
            alphas = {
                path: _of_pattern(config.get("alpha_pattern"), name, alpha)
                for path, name in targets.items()
            }
            self.adapter = Adapter(
                kind="dora" if config.get("use_dora") else "lora", rank=rank, alpha=alpha,
                rank_stabilised=bool(config.get("use_rslora")), targets=tuple(targets),
                rank_pattern={path: own for path, own in ranks.items() if own != rank},
                alpha_pattern={path: own for path, own in alphas.items() if own != alpha},
                dropout=config.get("lora_dropout") or 0.0, **self._vocabulary(config),
            )  # fmt: skip
        except (OSError, SafetensorError) as error:
            raise WeftError(
                f"{folder / TENSORS} is missing or damaged ({error}); save the adapter again"
            ) from None
        except (KeyError, ValueError) as error:
            raise WeftError(
                f"{folder / CONFIG} has no usable {str(error).splitlines()[0]}"
            ) from None

    def _targets(self) -> dict[str, str]:
        """Return the paths of the adapted weights, each with the name of its first factor."""
        targets = {}
        for name in self.sizes:
            if name.endswith(PARTS["a"]):
                path = name.removesuffix("." + PARTS["a"])
                layer, inside = inside_layer(path.removeprefix("base_model."))
                if inside not in ADAPTED:
                    raise WeftError(
                        f"{self.folder / TENSORS} adapts {path.rpartition('.')[2]}, which Weft has no adapter for"
                    )
                targets[f"blocks.{layer}.{ADAPTED[inside]}"] = name
        return targets

    def _vocabulary(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings about embedding and output layer, which PEFT saves whole if the vocabulary has grown."""
        saved = list(config.get("modules_to_save") or ())
        # Beside a weight that is saved whole stand copies of it, where the vocabulary has grown.
        self.sizes = {
            name: size for name, size in self.sizes.items() if not name.endswith(COPIES)
        }
        given = config.get("trainable_token_indices") or {}
        of = given if isinstance(given, dict) else {"embed_tokens": given}
        for setting, names in {
            "modules_to_save": saved,
            "trainable_token_indices": of,
        }.items():
            if other := [name for name in names if name not in VOCABULARY]:
                raise WeftError(f"{self.folder / CONFIG}: {setting} has {other[0]!r}, which is not supported; "
                                f"{' and '.join(VOCABULARY)} are")  # fmt: skip
        self._place_rows(of)
        learned = {
            name: sorted(tokens)
            for name, tokens in of.items()
            if peft_name(ROWS[name]) in self.sizes
        }
        self.orders = {
            peft_name(ROWS[name]): torch.tensor(of[name]).argsort() for name in learned
        }
        self.tokens = next(iter(learned.values()), [])
        if any(tokens != self.tokens for tokens in learned.values()):
            raise WeftError(f"{self.folder / CONFIG}: trainable_token_indices names other tokens for embed_tokens than "
                            "for lm_head, which is not supported; train the same for both")  # fmt: skip
        whole = [
            name for name in VOCABULARY if peft_name(VOCABULARY[name]) in self.sizes
        ]
        if missing := [name for name in saved if name not in whole]:
            raise WeftError(
                f"{self.folder / TENSORS} has nothing for {missing[0]}, which modules_to_save names"
            )
        return {
            "whole": tuple(whole),
            "tokens": tuple(self.tokens),
            "tokens_of": tuple(learned) or tuple(VOCABULARY),
        }

    def _place_rows(self, tokens: Mapping[str, list[int]]) -> None:
        """Join trained rows and the stored weight under them, whose vocabulary has grown, to one whole weight."""
        self.placed = {}
        for weight in (*VOCABULARY, *tokens):
            rows, whole = peft_name(ROWS[weight]), peft_name(VOCABULARY[weight])
            if (under := rows.replace(DELTA, UNDER)) in self.sizes:
                self.sizes[whole] = self.sizes.pop(under)
                self.sizes.pop(rows, None)
                self.placed[whole] = (
                    under,
                    rows,
                    tokens.get(weight) or tokens["embed_tokens"],
                )

    @property
    def vocab(self) -> int:
        """Least size of the vocabulary with which the adapter can be used.

        If the adapter stores a whole embedding or output layer, the vocabulary has at least as many tokens as that
        layer has rows. It also includes all tokens whose rows are trained.
        """
        sizes = [
            self.sizes[peft_name(VOCABULARY[name])][0] for name in self.adapter.whole
        ]
        return max([*sizes, *(token + 1 for token in self.tokens)], default=0)

    def tensor(self, name: str) -> torch.Tensor:
        """Read the tensor with PEFT's name ``name``. Rows of trained tokens are sorted by token id.

        A weight that is stored as base and trained rows (``placed``) is returned whole.
        """
        with safe_open(self.folder / TENSORS, "pt") as file:
            if name in self.placed:
                under, rows, tokens = self.placed[name]
                return file.get_tensor(under).index_copy(
                    0, torch.tensor(tokens), file.get_tensor(rows)
                )
            stored = file.get_tensor(name)
        return stored[self.orders[name]] if name in self.orders else stored

    def values(self, shape: ModelShape) -> Values:
        """Return a function that reads the adapter's parameters for a model of ``shape``, box by box.

        Raises :class:`WeftError` if the adapter does not fit that model.
        """
        table = whole_table(shape)
        wanted = {
            name: row
            for name, row in table.items()
            if of_adapter(name, shape) and name != VALUE_HEAD
        }
        named = {peft_name(name): name for name in wanted}
        twice = self._tied(shape)
        for theirs in (*named, *(name for name in self.sizes if name not in twice)):
            needed = wanted[named[theirs]].shape if theirs in named else None
            if (stored := self.sizes.get(theirs)) != needed:
                raise WeftError(
                    f"{self.folder} is an adapter for another model: {theirs} is {stored or 'missing'} there, and here "
                    f"{needed or 'there is no such weight'}; give the model for which it was trained"
                )
        file = safe_open(self.folder / TENSORS, "pt")

        def values(name: str, logical: Logical, box: Box) -> torch.Tensor:
            theirs = peft_name(name)
            if theirs in self.placed or theirs in self.orders:
                return self.tensor(theirs)[slices(box)]
            return file.get_slice(theirs)[slices(box)]

        return values

    def _tied(self, shape: ModelShape) -> set[str]:
        """Return the tensors of a tied output layer. Raises :class:`WeftError` if they differ from the embedding's."""
        if not shape.tied:
            return set()
        pairs = {
            peft_name(of["embed_tokens"]): peft_name(of["lm_head"])
            for of in (VOCABULARY, ROWS)
        }
        for first, second in pairs.items():
            rows = first.endswith(DELTA)  # which PEFT ties itself
            has_first, has_second = ((name in self.sizes) for name in (first, second))
            if (has_first != has_second and not (rows and has_first)) or (
                has_first
                and has_second
                and not torch.equal(self.tensor(first), self.tensor(second))
            ):
                raise WeftError(
                    f"{self.folder} trains embed_tokens and lm_head apart, and this model has one weight for both "
                    "(tie_word_embeddings); train both with ensure_weight_tying, or untie the model first"
                )
        return set(pairs.values())


def _tokens(shape: ModelShape) -> dict[str, list[int]] | list[int] | None:
    """Return the tokens with trained rows in PEFT's form: a list if only the embedding has them, else by weight."""
    names: tuple[VocabularyWeight, ...] = ("embed_tokens", "lm_head")
    learned = {
        str(name): list(tokens) for name in names if (tokens := row_tokens(shape, name))
    }
    return (
        learned["embed_tokens"]
        if learned.keys() == {"embed_tokens"}
        else learned or None
    )


def _of_pattern(pattern: Mapping[str, Any] | None, name: str, usual: Any) -> Any:
    """Return the value of the first expression of PEFT's ``pattern`` that matches ``name``, else ``usual``."""
    module = name.removeprefix("base_model.model.").removesuffix("." + PARTS["a"])
    fitting = (
        value
        for key, value in (pattern or {}).items()
        if re.match(rf"(.*\.)?({key})$", module)
    )
    return next(fitting, usual)


def write_adapter(
    tensors: Mapping[str, torch.Tensor], shape: ModelShape, base: str | None, folder: Path,
    files: Mapping[str, bytes] | None = None,
) -> None:  # fmt: skip
    """Write an adapter in PEFT's format to the new folder ``folder``.

    ``tensors``: parameters by Weft's names; only the adapter's are written. ``shape``: shape of the model with the
    adapter. ``base``: name of the base model, or None. ``files``: contents of files by name; only the tokenizer's are
    written. Raises :class:`WeftError` if the model is one that only Weft can compute, so that PEFT cannot use the
    adapter.
    """
    adapter = shape.adapter
    assert adapter is not None
    if shape.residual != "standard":
        raise WeftError(
            f"no other program computes the adapter's model, whose residual = {shape.residual!r}; keep Weft's own "
            "checkpoint"
        )
    paths = [
        p for p in projections(shape) if any(is_target(t, p) for t in adapter.targets)
    ]
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
        "init_lora_weights": True, "modules_to_save": list(adapter.whole) or None,
        "trainable_token_indices": _tokens(shape),
        "rank_pattern": {n: rank for p, n in named.items() if (rank := adapter_rank(adapter, p)) != adapter.rank},
        "alpha_pattern": {n: alpha for p, n in named.items() if (alpha := adapter_alpha(adapter, p)) != adapter.alpha},
    }  # fmt: skip
    written = {
        peft_name(name): tensor.detach().cpu().contiguous()
        for name, tensor in tensors.items()
        if of_adapter(name, shape) and name != VALUE_HEAD
    }
    if shape.tied and adapter.whole:  # PEFT has a copy for each of the two
        config["modules_to_save"] = list(VOCABULARY)
        written[peft_name("head")] = written[peft_name("embedding.table")].clone()
    with new_folder(folder) as draft:
        (draft / TENSORS).write_bytes(save(written, {"format": "pt"}))
        for name, content in (files or {}).items():
            if re.fullmatch(TOKENIZER_FILES, name):
                (draft / name).write_bytes(content)
        (draft / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def read_adapter(folder: Path, model: Transformer) -> HostAdapter:
    """Read the LoRA adapter in ``folder`` (PEFT's format) in a form that can be applied to some rows of a batch only.

    ``model``: the model that the adapter is for. The whole adapter is read, even if this rank holds only a part of
    ``model``; :func:`weft.models.row_adapters.own_part` cuts it for the rank. Raises :class:`WeftError` if the adapter
    is for another model, or is not a LoRA adapter of linear layers alone.
    """
    if not is_adapter(folder):
        raise WeftError(
            f"{folder} has no adapter as PEFT writes it; write one with `weft export`"
        )
    peft = PeftAdapter(folder)
    if peft.adapter.kind != "lora":
        raise WeftError(f"{folder} is a {peft.adapter.kind} adapter, which needs the weights themselves; "
                        "serve the model with it merged (`weft export --merge`)")  # fmt: skip
    if peft.adapter.whole or peft.adapter.tokens:
        raise WeftError(f"{folder} has trained rows of the vocabulary, which all texts share; serve the model with it "
                        "merged (`weft export --merge`)")  # fmt: skip
    unread, layers = dict(peft.sizes), []
    whole = (
        model
        if len(model.blocks) == model.shape.layers
        else Transformer(model.shape, Mesh.single())
    )
    for number, modules in enumerate(layer_modules(whole)):
        factors = []
        for module, weights in modules.items():
            for name, logical in weights.logical.items():
                names = [
                    peft_name(f"blocks.{number}.{module}{ADAPTERS}{name}.{part}")
                    for part in "ab"
                ]
                if names[0] not in unread or name in ABSORBED:
                    continue
                sizes = [unread.pop(each) for each in names]
                rank = sizes[0][0]
                if sizes != [(rank, logical.shape[1]), (logical.shape[0], rank)]:
                    raise WeftError(f"{folder} is an adapter for another model: {names[0]} and its partner are "
                                    f"{sizes}, and the weight is {tuple(logical.shape)} here")  # fmt: skip
                a, b = (peft.tensor(each) for each in names)
                factors.append(
                    (
                        module,
                        name,
                        a,
                        b
                        * adapter_scale(
                            peft.adapter, f"blocks.{number}.{module}.{name}"
                        ),
                    )
                )
        layers.append(laid_out(factors))
    if unread:
        raise WeftError(
            f"{folder} adapts {next(iter(unread))}, which this model does not have, or not where it is read"
        )
    forms, values = zip(*layers, strict=True)
    return HostAdapter(forms, values)
