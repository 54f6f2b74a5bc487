"""A trained model from wherever it lies, and as Hugging Face has it."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from weft.checkpoint.load import StoredCheckpoint
from weft.checkpoint.s3 import Where, open_storage
from weft.checkpoint.store import extract, load_newest
from weft.checkpoint.weights import model_of
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.errors import WeftError
from weft.layout.mesh import Mesh
from weft.model_config import shape_from_config
from weft.models.hf import export, hf_values
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize, resident_state
from weft.recipe import Train


@contextmanager
def open_model(where: Where, device: str, warn: Callable[[str], None]) -> Iterator[tuple[Transformer, Tokenizer, Path]]:
    """Model and tokenizer of a run, a checkpoint or a Hugging Face folder, and a folder with the tokenizer's files.

    ``warn`` hears of checkpoints that are damaged, if an older one is taken instead.
    """
    mesh, place = Mesh.single(device), open_storage(where)
    if place.holds("config.json"):
        path = Path(str(place))
        model, _ = parallelize(shape_from_config(path), mesh, Train(), hf_values(path))
        yield model, load_tokenizer(str(path)), path
        return

    def load(checkpoint: StoredCheckpoint) -> Transformer:
        model, state = parallelize(model_of(checkpoint), mesh, Train(), lambda name, logical, box: torch.zeros(()))
        checkpoint.load(state.tensors())
        return model

    checkpoint, model = load_newest([where], load, warn)
    with tempfile.TemporaryDirectory(prefix="weft-tokenizer-") as folder:
        extract(checkpoint, Path(folder))
        yield model, load_tokenizer(folder), Path(folder)


def export_model(checkpoint: str, out: Path, warn: Callable[[str], None]) -> None:
    """Write the model under Hugging Face names into the new folder ``out``."""
    if out.exists():
        raise WeftError(f"--out {out} exists already; choose another folder")
    with open_model(checkpoint, "cpu", warn) as (model, tokenizer, folder):
        values = {p.name: p.local for p in resident_state(model, model.mesh).held}
        export(values, model.shape, out, tokenizer_folder=folder, eos=tokenizer.eos)
