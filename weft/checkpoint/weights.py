"""Open the model that a run starts from: a Hugging Face folder or id, a GGUF file, or a Weft checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weft.checkpoint.address import Where, open_storage
from weft.checkpoint.convert.foreign import Foreign
from weft.checkpoint.convert.peft import CONFIG, PeftAdapter, is_adapter
from weft.checkpoint.convert.sources import checkpoint_format, open_foreign
from weft.checkpoint.hub import is_of_hub, local_path
from weft.checkpoint.resume_check import check_unchanged
from weft.checkpoint.storage import LocalStorage
from weft.checkpoint.store import candidates, model_of, open_checkpoint, stored_files
from weft.data.tokenizer import Tokenizer, tokenizer_from_files
from weft.errors import WeftError
from weft.layout.dims import Box, Logical, Tensor, extents, slices
from weft.layout.parts import NAMES, TORCH_DTYPES, Part
from weft.models.grown_vocabulary import grown
from weft.models.hugging_face import check_stored, files_beside, hf_values
from weft.models.values import Values, seeded_values, with_adapter
from weft.shapes.config import shape_from_config
from weft.shapes.foreign_names import hf_names
from weft.shapes.parameters import of_adapter, without_critic

if TYPE_CHECKING:
    from weft.checkpoint.load import StoredCheckpoint
    from weft.recipe import ModelShape, Recipe

#: What the names of parameters' averages begin with in a checkpoint.
AVERAGE = "optimizer.ema."


@dataclass(frozen=True)
class Pretrained:
    """Opened model that ``model.from`` names.

    Attributes:
        ``name``: the model's name in messages.
        ``shape``: shape of the model.
        ``values``: function that reads a box (a region of elements) of a parameter; None if ``name`` is a
            ``config.json`` without weights.
        ``files``: contents of the files beside the weights, such as the tokenizer's, by name.
    """

    name: str
    shape: ModelShape
    values: Values | None
    files: Mapping[str, bytes] = field(default_factory=dict)

    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer among the model's files, or None if there is none.

        Raises :class:`WeftError` if the tokenizer's files are damaged.
        """
        return (
            tokenizer_from_files(self.files, self.name)
            if "tokenizer.json" in self.files
            else None
        )


def is_foreign(where: str) -> bool:
    """Return whether ``where`` is a local checkpoint, adapter or configuration of another program than Weft."""
    if not isinstance(open_storage(where), LocalStorage):
        return False
    path = Path(where)
    return (
        is_adapter(path)
        or path.suffix == ".json"
        or (path / "config.json").is_file()
        or checkpoint_format(path) not in ("weft", None)
    )


def open_pretrained(name: Where) -> Pretrained:
    """Open the model called ``name``, in any form that ``model.from`` accepts.

    Weights are read only later, and only the boxes that are asked for. Raises :class:`WeftError` if there is no such
    model.
    """
    where = local_path(str(name))
    place, path = open_storage(where), Path(where)
    if path.suffix == ".json":
        return Pretrained(str(name), shape_from_config(path), None, files_beside(path))
    if is_adapter(path):
        return _of_peft(str(name), path)
    kind = checkpoint_format(path) if isinstance(place, LocalStorage) else "weft"
    if kind is None and (path / "config.json").is_file():
        raise WeftError(
            f"{path} has no weights (*.safetensors); to start from new ones, name its config.json"
        )
    if kind == "weft":
        return open_trained(
            open_checkpoint(candidates(open_storage(where))[0]), str(name)
        )
    if kind == "hf":
        shape = shape_from_config(path)
        check_stored(path, shape)
        return Pretrained(
            str(name), shape, hf_values(path, shape), files_beside(path / "config.json")
        )
    foreign = open_foreign(where, kind)
    return Pretrained(str(name), foreign.model, _boxes(foreign), foreign.files)


def base_name(name: Where) -> str | None:
    """Return the name of the base model of the adapter ``name``, or None if the adapter does not name one."""
    where = local_path(str(name))
    if is_adapter(Path(where)):
        return PeftAdapter(Path(where)).base
    base = open_checkpoint(candidates(open_storage(where))[0]).meta.get("base") or {}
    name_of_base: str | None = base.get("from")
    return name_of_base


def shape_named(name: str) -> ModelShape:
    """Return the shape of the model called ``name``, in any form that ``model.from`` accepts.

    For a model on the Hugging Face hub, only ``config.json`` is downloaded.
    """
    path = Path(local_path(f"{name}/config.json" if is_of_hub(name) else name))
    return (
        shape_from_config(path)
        if path.name == "config.json"
        else open_pretrained(path).shape
    )


def starting_values(recipe: Recipe, shape: ModelShape) -> Values | None:
    """Return a function that reads the initial values of a run that starts from the model in ``model.from``.

    ``recipe``: the run's recipe. ``shape``: shape of the run's model. Parameters that the named model lacks get random
    values: a new adapter, new rows of the vocabulary, or a new output layer. Returns None if all parameters start from
    random values, because ``model.from`` is left out or names only a configuration.
    """
    pretrained = (
        None if recipe.model.origin is None else open_pretrained(recipe.model.origin)
    )
    if pretrained is None or pretrained.values is None:
        return None
    values, seed = pretrained.values, recipe.train.seed
    if shape.vocab > pretrained.shape.vocab:
        values = _with_vocabulary(pretrained, shape.vocab)
    if shape.output != pretrained.shape.output:
        values = _with_new_head(values, seed)
    begun = pretrained.shape.adapter is not None
    return values if begun else with_adapter(values, shape, seed)


def _with_new_head(base: Values, seed: int) -> Values:
    """``base`` with a new random output layer in place of its own, for a model that learns to score."""
    drawn = seeded_values(seed)
    return lambda name, logical, box: (drawn if name == "head" else base)(
        name, logical, box
    )


def stored_name(checkpoint: StoredCheckpoint, name: str, ema: bool = False) -> str:
    """Return the name of the tensor that holds the parameter ``name`` in ``checkpoint``.

    ``ema``: return the tensor of the parameter's moving average. A frozen parameter has no average, so its own tensor
    is returned.
    """
    average = AVERAGE + name
    return average if ema and average in checkpoint.tensors else f"model.{name}"


def open_trained(
    checkpoint: StoredCheckpoint, name: str = "", ema: bool = False
) -> Pretrained:
    """Open the model in a Weft checkpoint. An adapter is joined with its base model.

    ``name``: the model's name in messages, by default the checkpoint's address. ``ema``: take the parameters' moving
    averages instead of their last values. The critic of a policy is not part of the returned shape, but its values can
    be read. Raises :class:`WeftError` if the adapter's base model has changed since.
    """
    shape, base = model_of(checkpoint), checkpoint.meta.get("base")

    def values(name: str, logical: Logical, box: Box) -> torch.Tensor:
        kept = stored_name(checkpoint, name, ema)
        stored = checkpoint.tensors.get(kept)
        # of what only training needs, and now for the first time
        if stored is None and not hf_names(name, shape):
            return torch.zeros(extents(box))
        out = torch.empty(
            extents(box), dtype=TORCH_DTYPES[stored.dtype] if stored else None
        )
        checkpoint.load({kept: Part(out, box, Tensor(logical.shape, NAMES[out.dtype]))})
        return out

    files, name = stored_files(checkpoint), name or str(checkpoint)
    trimmed = without_critic(shape)
    if shape.adapter is None or base is None:
        return Pretrained(name, trimmed, values, files)
    if base["from"] is None:
        under = seeded_values(base["seed"])
    else:
        check_unchanged(checkpoint, base["from"])
        under = _base(name, base["from"], shape)
    return Pretrained(name, trimmed, _beside(under, values, shape), files)


def _of_peft(name: str, folder: Path) -> Pretrained:
    adapter = PeftAdapter(folder)
    if adapter.base is None:
        raise WeftError(
            f"{folder} does not say which model it is for; set base_model_name_or_path in its {CONFIG}"
        )
    base = open_pretrained(adapter.base)
    if base.values is None or base.shape.adapter is not None:
        raise WeftError(
            f"{folder} is an adapter for {adapter.base}, which has no weights of its own"
        )
    vocab = max(base.shape.vocab, adapter.vocab)
    shape = base.shape.model_copy(
        update={"adapter": adapter.adapter, "origin": name, "vocab": vocab}
    )
    values = _beside(_with_vocabulary(base, vocab), adapter.values(shape), shape)
    return Pretrained(name, shape, values, base.files)


def _base(adapter: str, name: str, shape: ModelShape) -> Values:
    """Return the values of ``name``, the base of ``adapter``. Raises :class:`WeftError` that names both."""
    try:
        return _with_vocabulary(open_pretrained(name), shape.vocab)
    except WeftError as error:
        raise WeftError(
            f"{adapter} is an adapter, and its base model cannot be read: {error}"
        ) from None


def _with_vocabulary(model: Pretrained, vocab: int) -> Values:
    """Return a model's values with its vocabulary grown to ``vocab`` rows."""
    assert model.values is not None
    if vocab == model.shape.vocab:
        return model.values
    return grown(model.values, model.shape, vocab)


def _beside(base: Values, adapter: Values, shape: ModelShape) -> Values:
    """Return the values of ``base``, stored as ``shape`` says, joined with those of ``adapter``."""
    stored = with_adapter(base, shape, 0)

    def values(name: str, logical: Logical, box: Box) -> torch.Tensor:
        return (adapter if of_adapter(name, shape) else stored)(name, logical, box)

    return values


def _boxes(foreign: Foreign) -> Values:
    def values(name: str, logical: Logical, box: Box) -> torch.Tensor:
        return foreign.read(name)[slices(box)]

    return values
