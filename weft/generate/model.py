"""A trained model from wherever it lies, and as Hugging Face has it."""

from collections.abc import Callable
from pathlib import Path

import torch

from weft.checkpoint.convert.peft import write_adapter
from weft.checkpoint.hub import local_path
from weft.checkpoint.load import StoredCheckpoint
from weft.checkpoint.s3 import Where
from weft.checkpoint.store import load_newest, model_of, stored_files
from weft.checkpoint.weights import base_name, is_foreign, of_checkpoint, open_pretrained
from weft.data.tokenizer import Tokenizer, tokenizer_from_files
from weft.errors import WeftError
from weft.layout.mesh import Mesh
from weft.models.adapters import base_of, merged_parameters
from weft.models.hf import export
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
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
        if model_of(checkpoint).adapter is not None:
            found = of_checkpoint(checkpoint)
            return parallelize(found.shape, mesh, Train(), found.values)[0]
        model, state = parallelize(model_of(checkpoint), mesh, Train(), lambda name, logical, box: torch.zeros(()))
        checkpoint.load(state.tensors())
        return model

    checkpoint, model = load_newest([where], load, warn)
    return model, stored_files(checkpoint)


def tokenizer_of(files: dict[str, bytes], where: Where) -> Tokenizer:
    """The tokenizer among a model's files; :class:`WeftError` if there is none."""
    return tokenizer_from_files(files, str(where))


def export_model(checkpoint: str, out: Path, warn: Callable[[str], None], merge: bool = False) -> None:
    """Write the model under Hugging Face names, with its tokenizer and chat template, into the new folder ``out``.

    Of a model with an adapter that alone, as PEFT has it; with ``merge`` the model with the adapter merged into it.
    """
    if out.exists():
        raise WeftError(f"--out {out} exists already; choose another folder")
    model, files = open_model(checkpoint, "cpu", warn)
    if merge and model.shape.adapter is None:
        raise WeftError(f"{checkpoint} has no adapter; leave out --merge")
    if merge or model.shape.adapter is None:
        export(merged_parameters(model), base_of(model.shape), out, files=files)
    else:
        write_adapter(dict(model.named_parameters()), model.shape, base_name(checkpoint), out, files)
