"""``weft generate`` and ``weft export``: use a checkpoint on one device."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console

from weft.checkpoint.load import Checkpoint
from weft.checkpoint.s3 import Where, open_storage
from weft.checkpoint.state import local_state
from weft.checkpoint.storage import holds
from weft.checkpoint.store import extract, load_newest
from weft.checkpoint.weights import model_of
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.errors import WeftError
from weft.generate.engine import generate, stream_text
from weft.layout.mesh import Mesh
from weft.models.hf import export, hf_values, shape_from_config
from weft.models.transformer import Transformer
from weft.parallel.build import local_parts, parallelize
from weft.recipe import Generate, Train


@contextmanager
def open_model(where: Where, device: str) -> Iterator[tuple[Transformer, Tokenizer, Path]]:
    """Model and tokenizer of a run, a checkpoint or a Hugging Face folder, and a folder with the tokenizer's files."""
    mesh, place = Mesh.single(device), open_storage(where)
    if holds(place, "config.json"):
        path = Path(str(place))
        model = parallelize(shape_from_config(path), mesh, Train(), hf_values(path))
        yield model, load_tokenizer(str(path)), path
        return

    def load(checkpoint: Checkpoint) -> Transformer:
        model = parallelize(model_of(checkpoint), mesh, Train(), lambda name, logical, box: torch.zeros(()))
        checkpoint.load(local_state(local_parts(model, mesh), None))
        return model

    checkpoint, model = load_newest([where], load, lambda text: print(f"weft: {text}", file=sys.stderr))
    with tempfile.TemporaryDirectory(prefix="weft-tokenizer-") as folder:
        extract(checkpoint, Path(folder))
        yield model, load_tokenizer(folder), Path(folder)


def run(checkpoint: str, prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with open_model(checkpoint, device) as (model, tokenizer, _):
        for piece in _continue(model, tokenizer, prompt, tokens, temperature, top_k, seed):
            print(piece, end="", flush=True)
    print()
    return 0


def _continue(model, tokenizer, prompt, tokens, temperature, top_k, seed=0):  # type: ignore[no-untyped-def]
    """The prompt, then the model's continuation piece by piece."""
    yield prompt
    ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eos]
    yield from stream_text(tokenizer, generate(model, ids, tokens, tokenizer.eos, temperature, top_k, seed))


def say_sample(checkpoint: Where, settings: Generate) -> None:
    """Show a few lines from a freshly trained model."""
    with open_model(checkpoint, "cpu") as (model, tokenizer, _):
        pieces = _continue(model, tokenizer, settings.prompt, settings.tokens, settings.temperature, settings.top_k)
        text = "".join(pieces)
    console = Console(highlight=False, soft_wrap=True)
    console.rule("the model writes", style="dim", align="left")
    console.print(text, markup=False)
    console.rule(style="dim")


def export_model(checkpoint: str, out: Path) -> Path:
    """Write the model under Hugging Face names into the new folder ``out``."""
    if out.exists():
        raise WeftError(f"--out {out} exists already; choose another folder")
    with open_model(checkpoint, "cpu") as (model, tokenizer, folder):
        values = {p.name: p.local for p in local_parts(model, model.mesh)}
        export(values, model.shape, out, tokenizer_folder=folder, eos=tokenizer.eos)
    return out
