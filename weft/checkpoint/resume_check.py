"""Check that a run may resume from a checkpoint.

Model and tokenizer must be equal, field by field, because a setting that changes no tensor's shape (heads,
``rope_theta``) makes another model, too. Other settings may change, and every difference is listed. A checkpoint of an
adapter's run holds the adapter alone and names its base model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from weft.checkpoint.address import open_storage
from weft.checkpoint.boxes import ROOT
from weft.checkpoint.hub import local_path
from weft.checkpoint.storage import LocalStorage, Storage, StorageError
from weft.checkpoint.store import candidates, model_of, open_checkpoint, stored_files
from weft.data.tokenizer import Tokenizer, tokenizer_from_files
from weft.errors import WeftError
from weft.layout.mesh import Mesh
from weft.parallel.build import whole_model
from weft.paths import real_path
from weft.recipe import ModelShape, Optimizer, Recipe
from weft.recipe.masked import masked_values

if TYPE_CHECKING:
    from weft.checkpoint.load import StoredCheckpoint

#: A foreign file's fingerprint is of its length and of so many pieces, of so many bytes each, spread over it.
PIECES, PIECE = 64, 64 << 10

#: Fields that say where a model's first values come from. Once it is trained, they change nothing.
ORIGIN = ("origin", "init_std")

#: Settings of ``[train]`` that change what a run computes.
SETTINGS = ("steps", "batch", "dtype")


def model_differences(stored: ModelShape, needed: ModelShape) -> list[str]:
    """Return a line of text for each field in which the model shapes ``stored`` and ``needed`` differ.

    A line such as ``model.layers = 4, the recipe 3`` gives the value in ``stored`` (a checkpoint's model), then the
    value in ``needed`` (the recipe's model). Fields that only say how a model is initialised, and dropout, are left
    out.
    """
    # dropout is of the run, not of the model
    stored = stored.model_copy(update={"dropout": needed.dropout})
    if stored.adapter and needed.adapter:
        kept = stored.adapter.model_copy(update={"dropout": needed.adapter.dropout})
        stored = stored.model_copy(update={"adapter": kept})
    pairs = [
        (name, getattr(stored, name), getattr(needed, name))
        for name in ModelShape.model_fields
    ]
    return [
        f"model.{name} = {_shown(a)}, the recipe {_shown(b)}"
        for name, a, b in pairs
        if a != b and name not in ORIGIN
    ]


def is_of_model(place: Storage, shape: ModelShape) -> bool:
    """Return whether the checkpoint at ``place`` is of a model with ``shape``.

    A damaged checkpoint gives False. Raises :class:`StorageError` if the storage cannot be read.
    """
    try:
        return not model_differences(model_of(open_checkpoint(place)), shape)
    except StorageError:
        raise
    except WeftError:
        return False


def check_resumable(
    checkpoint: StoredCheckpoint,
    shape: ModelShape,
    tokenizer: Tokenizer,
    optimizer: Optimizer,
) -> None:
    """Raise :class:`WeftError` if a run with this model, tokenizer and optimizer cannot resume from ``checkpoint``.

    ``shape``: shape of the run's model; ``tokenizer``: tokenizer of its data; ``optimizer``: the recipe's section.
    Reasons are that the checkpoint was converted from another program, or that its model, tokenizer or optimizer
    differs.
    """
    instead = f"start a new run from its weights: --set model.from={checkpoint}"
    if "data" not in checkpoint.meta:
        kind = checkpoint.meta.get("source", {}).get("kind", "another program's")
        raise WeftError(
            f"{checkpoint} was converted (from {kind}) and has no position in the data; {instead}"
        )
    if differences := model_differences(model_of(checkpoint), shape):
        raise WeftError(
            f"{checkpoint} is of another model: it has {'; it has '.join(differences)}; restore what was changed, or "
            "start another run with another --out"
        )
    stored_optimizer = checkpoint.meta.get("recipe", {}).get("optimizer", {})
    kept = [*optimizer.hosts, *getattr(optimizer.update_rule, "shaping", ())]
    if other := _differing(
        "optimizer",
        {"optimizer": stored_optimizer},
        {"optimizer": optimizer.model_dump()},
        kept,
    ):
        raise WeftError(
            f"{checkpoint} has another optimizer's state: {'; '.join(other)}; restore that, or {instead}"
        )
    names = dict(whole_model(shape, Mesh.single()).logical_parameters())
    # of models beside it, loading knows
    known = re.compile(
        rf"critic\..+|(model|optimizer\..+)\.({'|'.join(map(re.escape, names))})"
    )
    if extra := sorted(
        name for name in checkpoint.tensors if not known.fullmatch(name)
    ):
        raise WeftError(
            f"{checkpoint} holds {len(extra)} tensors that this model has no place for, such as {extra[0]}"
        )
    stored = tokenizer_from_files(stored_files(checkpoint), str(checkpoint))
    if not stored.has_ids_of(tokenizer):
        raise WeftError(
            f"{checkpoint} was trained with another tokenizer (of {stored.vocab} entries, the recipe's has "
            f"{tokenizer.vocab}), so its tokens mean other text; restore data.tokenizer, or {instead}"
        )


def other_differences(
    checkpoint: StoredCheckpoint, recipe: Recipe, fingerprint: str
) -> list[str]:
    """Return a line of text for each difference between ``recipe`` and the recipe in ``checkpoint`` that does not
    prevent resuming.

    ``fingerprint``: digest of the data that ``recipe`` names.
    """
    # older checkpoints have the secrets of addresses, which may change from day to day
    stored, present = (
        masked_values(checkpoint.meta.get("recipe", {})),
        recipe.recorded(),
    )
    differences = _differing(
        "optimizer", stored, present, type(recipe.optimizer).model_fields
    )
    differences += _differing("train", stored, present, SETTINGS)
    differences += _differing("model", stored, present, ("dropout",))
    if stored.get("adapter") and recipe.adapter:
        differences += _differing("adapter", stored, present, ("dropout",))
    if checkpoint.meta["data"] != fingerprint:
        position = f"{checkpoint.meta['progress']['position']:,}"
        if recipe.stream is not None and stored.get("stream"):
            differences += _differing("stream", stored, present, ("producers",))
            differences.append(
                "simulators are known by their places in stream.producers: samples of others may count as those of "
                "before"
            )
            return differences
        data = _differing(
            "data", stored, present, ("sources", "seq_len", "seed", "validation", "bos")
        )
        differences += data or [
            "the documents of data.sources are not those that the checkpoint was trained on"
        ]
        differences.append(
            f"other data is read on from sample {position} of its order: some may come twice, some never"
        )
    return differences


def _differing(section: str, stored: Any, present: Any, names: Any) -> list[str]:
    before, now = _completed(stored.get(section, {})), present[section]
    return [
        f"{section}.{name} = {_shown(now[name])}, the checkpoint was trained with {_shown(before[name])}"
        for name in names
        if name in before and before[name] != now[name]
    ]


def _completed(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a recorded section in which every source has the settings that sources have had only since."""
    if "sources" not in section:
        return section
    since = {"name": "", "where": {}}
    return {**section, "sources": [since | source for source in section["sources"]]}


def _shown(value: Any) -> str:
    return repr(value.model_dump() if hasattr(value, "model_dump") else value)


def model_fingerprint(name: str) -> str:
    """Return a digest that identifies the weights of the model called ``name`` (a path or an id).

    For a Weft checkpoint it covers the root file, which has the digests of all blocks. For other formats it covers
    samples of the files (:data:`PIECES`).
    """
    where = local_path(name)
    place, path = open_storage(where), Path(where)
    files = (
        [path]
        if path.is_file()
        else sorted(path.glob("*.safetensors")) + sorted(path.glob("*.gguf"))
    )
    seen = xxhash.xxh3_128()
    if not (isinstance(place, LocalStorage) and files):
        # which has the digests of all blocks
        seen.update(open_storage(str(candidates(place)[0])).read(ROOT))
        return str(seen.hexdigest())
    for file in files:
        size = file.stat().st_size
        seen.update(f"{file.name if len(files) > 1 else ''} {size}\n".encode())
        with file.open("rb") as stream:
            for i in range(PIECES):
                stream.seek(max(0, size - PIECE) * i // (PIECES - 1), os.SEEK_SET)
                seen.update(stream.read(PIECE))
    return str(seen.hexdigest())


def run_base(recipe: Recipe, shape: ModelShape) -> dict[str, Any] | None:
    """Return a description of the base model of an adapter's run, or None if the run trains no adapter.

    ``recipe``: the run's recipe; ``shape``: shape of its model. The description has the keys ``from`` (name of the base
    model) and ``fingerprint``, or, for a base with random weights, ``from`` (None) and ``seed``.
    """
    if shape.adapter is None:
        return None
    name = recipe.model.origin
    if name is None or name.endswith(".json"):
        return {"from": None, "seed": recipe.train.seed}
    return {
        "from": str(real_path(name)) if Path(name).exists() else name,
        "fingerprint": model_fingerprint(name),
    }


def check_same_base(
    checkpoint: StoredCheckpoint, needed: Mapping[str, Any] | None
) -> None:
    """Raise :class:`WeftError` if the adapter in ``checkpoint`` was trained with another base model than ``needed``.

    ``needed``: the description of the run's base model from :func:`run_base`; None: the run trains no adapter.
    """
    stored = checkpoint.meta.get("base")
    if (
        stored is not None
        and needed is not None
        and _identity(stored) != _identity(needed)
    ):
        raise WeftError(
            f"{checkpoint} is an adapter for another model: {_named(stored)}, and the recipe's is {_named(needed)}; "
            "restore model.from (or train.seed, of new weights)"
        )


def check_unchanged(checkpoint: StoredCheckpoint, name: str) -> None:
    """Raise :class:`WeftError` if the base model called ``name`` is not that of the adapter in ``checkpoint``.

    The fingerprints are compared, so a base model that has changed since the training of the adapter is noticed.
    """
    if model_fingerprint(name) != checkpoint.meta["base"]["fingerprint"]:
        raise WeftError(
            f"{checkpoint} is an adapter for another model than {name} is now; put back the one it was"
        )


def _identity(base: Mapping[str, Any]) -> Any:
    return base.get("fingerprint"), base.get("seed")


def _named(base: Mapping[str, Any]) -> str:
    if base["from"] is None:
        return f"new weights of seed {base['seed']}"
    return f"{base['from']} ({base['fingerprint'][:8]})"
