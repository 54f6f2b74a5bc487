"""The base of an adapter: checkpoints of an adapter's run hold the adapter alone, and say which model lies under it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from weft.checkpoint.format import ROOT
from weft.checkpoint.hub import local_path
from weft.checkpoint.load import StoredCheckpoint
from weft.checkpoint.s3 import open_storage
from weft.checkpoint.storage import LocalStorage
from weft.checkpoint.store import candidates
from weft.errors import WeftError
from weft.recipe import ModelShape, Recipe

#: Of a foreign file this many pieces of so many bytes are looked at, spread over it, and its length.
PIECES, PIECE = 64, 64 << 10


def fingerprint(name: str) -> str:
    """What tells the model called ``name`` from another one, without reading all of it."""
    where = local_path(name)
    place, path = open_storage(where), Path(where)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors")) + sorted(path.glob("*.gguf"))
    seen = xxhash.xxh3_128()
    if not (isinstance(place, LocalStorage) and files):
        seen.update(open_storage(str(candidates(place)[0])).read(ROOT))  # which has the digests of all blocks
        return str(seen.hexdigest())
    for file in files:
        size = file.stat().st_size
        seen.update(f"{file.name if len(files) > 1 else ''} {size}\n".encode())
        with file.open("rb") as stream:
            for i in range(PIECES):
                stream.seek(max(0, size - PIECE) * i // (PIECES - 1), os.SEEK_SET)
                seen.update(stream.read(PIECE))
    return str(seen.hexdigest())


def base_of_run(recipe: Recipe, shape: ModelShape) -> dict[str, Any] | None:
    """What lies under the adapter of a run: a model by name and fingerprint, or new values by their seed."""
    if shape.adapter is None:
        return None
    name = recipe.model.origin
    if name is None or name.endswith(".json"):
        return {"from": None, "seed": recipe.train.seed}
    return {"from": str(Path(name).resolve()) if Path(name).exists() else name, "fingerprint": fingerprint(name)}


def check_same_base(checkpoint: StoredCheckpoint, needed: Mapping[str, Any] | None) -> None:
    """Refuse to go on with an adapter that was trained beside another model than ``needed``."""
    stored = checkpoint.meta.get("base")
    if stored is not None and needed is not None and _identity(stored) != _identity(needed):
        raise WeftError(
            f"{checkpoint} is an adapter for another model: {_named(stored)}, and the recipe's is {_named(needed)}; "
            "restore model.from (or train.seed, of new weights)"
        )


def check_unchanged(checkpoint: StoredCheckpoint, name: str) -> None:
    """Refuse a base model that is not what it was when the adapter was trained."""
    if fingerprint(name) != checkpoint.meta["base"]["fingerprint"]:
        raise WeftError(f"{checkpoint} is an adapter for another model than {name} is now; put back the one it was")


def _identity(base: Mapping[str, Any]) -> Any:
    return base.get("fingerprint"), base.get("seed")


def _named(base: Mapping[str, Any]) -> str:
    if base["from"] is None:
        return f"new weights of seed {base['seed']}"
    return f"{base['from']} ({base['fingerprint'][:8]})"
