"""Weights to start from: of a Hugging Face folder, or of a checkpoint of Weft's, wherever it is."""

import tempfile
from pathlib import Path

import torch
from pydantic import ValidationError

from weft.checkpoint.load import StoredCheckpoint
from weft.checkpoint.s3 import Where, open_storage
from weft.checkpoint.store import candidates, extract, open_checkpoint
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.errors import WeftError
from weft.layout.dims import Box, Logical, Tensor
from weft.layout.parts import NAMES, TORCH_DTYPES, Part
from weft.model_config import shape_from_config
from weft.models.hf import hf_values
from weft.models.values import Values, with_adapter
from weft.recipe import ModelShape, Recipe


def model_of(checkpoint: StoredCheckpoint) -> ModelShape:
    """The model that a checkpoint of Weft's is of. Raises :class:`WeftError` if it does not say."""
    try:
        return ModelShape.model_validate(checkpoint.meta["recipe"]["model"])
    except (KeyError, TypeError, ValidationError):
        raise WeftError(f"{checkpoint} does not say which model it is of") from None


def _foreign(where: Where) -> bool:
    place = open_storage(where)
    return place.holds("config.json") or Path(str(place)).is_file()


def shape_of(where: Path) -> ModelShape:
    """The model's shape, from a ``config.json`` or a checkpoint of Weft's."""
    return (
        shape_from_config(where) if _foreign(where) else model_of(open_checkpoint(candidates(open_storage(where))[0]))
    )


def stored_tokenizer(where: Path) -> tuple[Tokenizer | None, str]:
    """The tokenizer that is stored with weights, if there is one, and the path by which a recipe can name it."""
    if _foreign(where):
        folder = Path(str(where))
        return (load_tokenizer(str(folder)) if (folder / "tokenizer.json").is_file() else None), str(folder)
    checkpoint = open_checkpoint(candidates(open_storage(where))[0])
    file = next((name for name in checkpoint.meta["files"] if Path(name).name == "tokenizer.json"), None)
    if file is None:
        return None, str(checkpoint)
    with tempfile.TemporaryDirectory(prefix="weft-tokenizer-") as folder_:
        extract(checkpoint, Path(folder_))
        return load_tokenizer(folder_), f"{checkpoint}/{file}"


def starting_values(recipe: Recipe, shape: ModelShape) -> Values | None:
    """What a run of ``recipe`` begins with: given weights, and a new adapter beside them; None if all are drawn."""
    if recipe.model.weights is None:
        return None
    return with_adapter(values_of(recipe.model.weights), shape, recipe.train.seed)


def values_of(where: Path) -> Values:
    """Values for :func:`weft.parallel.build.parallelize`; just the box that is asked for is read, and verified."""
    if _foreign(where):
        return hf_values(where)
    checkpoint = open_checkpoint(candidates(open_storage(where))[0])

    def values(name: str, logical: Logical, box: Box) -> torch.Tensor:
        stored = checkpoint.tensors.get(f"model.{name}")
        out = torch.empty([hi - lo for lo, hi in box], dtype=TORCH_DTYPES[stored.dtype] if stored else None)
        checkpoint.load({f"model.{name}": Part(out, box, Tensor(logical.shape, NAMES[out.dtype]))})
        return out

    return values
