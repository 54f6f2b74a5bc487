"""A trained model from wherever it lies, and as Hugging Face has it."""

from collections.abc import Callable
from pathlib import Path

import torch

from weft.checkpoint.hub import local_path
from weft.checkpoint.load import StoredCheckpoint
from weft.checkpoint.s3 import Where
from weft.checkpoint.store import load_newest, model_of, stored_files
from weft.checkpoint.weights import is_foreign, open_pretrained
from weft.data.tokenizer import Tokenizer, tokenizer_from_files
from weft.errors import WeftError
from weft.layout.mesh import Mesh
from weft.models.hf import export
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize, resident_state
from weft.recipe import Train


def open_model(where: Where, device: str, warn: Callable[[str], None]) -> tuple[Transformer, dict[str, bytes]]:
    """The model of a run, a checkpoint or whatever ``model.from`` can name, and the files of its tokenizer.

    ``warn`` hears of checkpoints that are damaged, if an older one is taken instead.
    """
    mesh, where = Mesh.single(device), local_path(str(where))
    if is_foreign(where):
        found = open_pretrained(where)
        if found.values is None:
            raise WeftError(f"{where} is a configuration without weights; give the folder that has them")
        return parallelize(found.shape, mesh, Train(), found.values)[0], dict(found.files)

    def load(checkpoint: StoredCheckpoint) -> Transformer:
        model, state = parallelize(model_of(checkpoint), mesh, Train(), lambda name, logical, box: torch.zeros(()))
        checkpoint.load(state.tensors())
        return model

    checkpoint, model = load_newest([where], load, warn)
    return model, stored_files(checkpoint)


def tokenizer_of(files: dict[str, bytes], where: Where) -> Tokenizer:
    """The tokenizer among a model's files; :class:`WeftError` if there is none."""
    return tokenizer_from_files(files, str(where))


def export_model(checkpoint: str, out: Path, warn: Callable[[str], None]) -> None:
    """Write the model under Hugging Face names, with its tokenizer and chat template, into the new folder ``out``."""
    if out.exists():
        raise WeftError(f"--out {out} exists already; choose another folder")
    model, files = open_model(checkpoint, "cpu", warn)
    values = {p.name: p.local for p in resident_state(model, model.mesh).held}
    export(values, model.shape, out, files=files)
