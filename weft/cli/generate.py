"""``weft generate`` and ``weft export``: use a checkpoint on one device."""

import sys
from pathlib import Path

import torch
from rich.console import Console

from weft.checkpoint.format import DamagedCheckpoint
from weft.checkpoint.state import local_state
from weft.checkpoint.store import extras, open_checkpoint, whole
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.errors import WeftError
from weft.generate.engine import generate, stream_text
from weft.layout.mesh import Mesh
from weft.models.hf import export, hf_values, shape_from_config
from weft.models.transformer import Transformer
from weft.parallel.build import local_parts, parallelize
from weft.recipe import Generate, Recipe, Train


def open_model(path: Path, device: str) -> tuple[Transformer, Tokenizer, Path]:
    """Model and tokenizer of a run folder, a checkpoint or a Hugging Face folder, and the tokenizer's folder."""
    if not path.exists():
        raise WeftError(f"--checkpoint {path} does not exist; give a run folder, a checkpoint or a Hugging Face folder")
    mesh = Mesh.single(device)
    if (path / "config.json").is_file():
        model = parallelize(shape_from_config(path), mesh, Train(), hf_values(path))
        return model, load_tokenizer(str(path)), path

    def warn(text: str) -> None:
        print(f"weft: {text}", file=sys.stderr)

    for folder, meta in whole(path, warn):
        shape = Recipe.model_validate(meta["recipe"]).model
        model = parallelize(shape, mesh, Train(), lambda name, logical, box: torch.zeros(()))
        try:
            open_checkpoint(folder).load(local_state(local_parts(model, mesh), None))
        except DamagedCheckpoint as error:
            if folder == path:
                raise
            warn(f"{error}; trying the one before")
            continue
        files = extras(folder, meta)
        return model, load_tokenizer(str(files)), files
    raise AssertionError("whole() raises after the last")


def run(checkpoint: Path, prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer, _ = open_model(checkpoint, device)
    for piece in _continue(model, tokenizer, prompt, tokens, temperature, top_k, seed):
        print(piece, end="", flush=True)
    print()
    return 0


def _continue(model, tokenizer, prompt, tokens, temperature, top_k, seed=0):  # type: ignore[no-untyped-def]
    """The prompt, then the model's continuation piece by piece."""
    yield prompt
    ids = [int(i) for i in tokenizer.encode(prompt)] or [tokenizer.eos]
    yield from stream_text(tokenizer, generate(model, ids, tokens, tokenizer.eos, temperature, top_k, seed))


def say_sample(checkpoint: Path, settings: Generate) -> None:
    """Show a few lines from a freshly trained model."""
    model, tokenizer, _ = open_model(checkpoint, "cpu")
    pieces = _continue(model, tokenizer, settings.prompt, settings.tokens, settings.temperature, settings.top_k)
    console = Console(highlight=False, soft_wrap=True)
    console.rule("the model writes", style="dim", align="left")
    console.print("".join(pieces), markup=False)
    console.rule(style="dim")


def export_model(checkpoint: Path, out: Path) -> Path:
    """Write the model under Hugging Face names into the new folder ``out``."""
    if out.exists():
        raise WeftError(f"--out {out} exists already; choose another folder")
    model, tokenizer, folder = open_model(checkpoint, "cpu")
    values = {p.name: p.local for p in local_parts(model, model.mesh)}
    export(values, model.shape, out, tokenizer_folder=folder, eos=tokenizer.eos)
    return out
