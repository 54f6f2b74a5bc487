"""``weft generate`` and ``weft export``: use a checkpoint on one device, or of long prompts on several."""

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from weft.checkpoint.load import Checkpoint
from weft.checkpoint.s3 import Where, open_storage
from weft.checkpoint.storage import holds
from weft.checkpoint.store import extract, load_newest
from weft.checkpoint.weights import model_of
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.errors import UsageError, WeftError
from weft.generate.engine import generate, stream_text
from weft.generate.spread import check_spread
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.model_config import shape_from_config
from weft.models.hf import export, hf_values
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize, resident_state
from weft.recipe import Generate, ModelShape, Train
from weft.train.launch import in_ranks, init_ranks, launch, part_ranks, set_threads


@contextmanager
def open_model(where: Where, device: str) -> Iterator[tuple[Transformer, Tokenizer, Path]]:
    """Model and tokenizer of a run, a checkpoint or a Hugging Face folder, and a folder with the tokenizer's files."""
    mesh, place = Mesh.single(device), open_storage(where)
    if holds(place, "config.json"):
        path = Path(str(place))
        model, _ = parallelize(shape_from_config(path), mesh, Train(), hf_values(path))
        yield model, load_tokenizer(str(path)), path
        return

    def load(checkpoint: Checkpoint) -> Transformer:
        model, state = parallelize(model_of(checkpoint), mesh, Train(), lambda name, logical, box: torch.zeros(()))
        checkpoint.load(state.tensors())
        return model

    checkpoint, model = load_newest([where], load, lambda text: print(f"weft: {text}", file=sys.stderr))
    with tempfile.TemporaryDirectory(prefix="weft-tokenizer-") as folder:
        extract(checkpoint, Path(folder))
        yield model, load_tokenizer(folder), Path(folder)


def run(
    checkpoint: str, prompt: str | None, file: Path | None, tokens: int, temperature: float, top_k: int, seed: int,
    layout: str | None,
) -> int:  # fmt: skip
    """Print the continuation of ``prompt``, after it, or of the text in ``file``, which is not repeated."""
    if (prompt is None) == (file is None):
        raise UsageError("give either --prompt TEXT or --prompt-file FILE")
    spread, device = Layout.parse(layout or ""), "cuda" if torch.cuda.is_available() else "cpu"
    check_spread(spread, ModelShape())
    if spread.world > 1 and not in_ranks():
        return launch(sys.argv[1:], spread.world)
    if spread.world > 1:
        set_threads(0, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        init_ranks(device, timeout_s=1800)
        device = f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device
    try:
        text = prompt if file is None else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt-file {file} cannot be read: {error}") from None
    assert text is not None
    with open_model(checkpoint, device) as (model, tokenizer, _):
        check_spread(spread, model.shape)
        ids = [int(i) for i in tokenizer.encode(text)] or [tokenizer.eos]
        clock = [time.perf_counter()]
        fresh = _timed(generate(model, ids, tokens, tokenizer.eos, temperature, top_k, seed, spread), clock)
        if prompt:
            _say(prompt)
        for piece in stream_text(tokenizer, fresh):
            _say(piece)
    _say("\n")
    if spread.world > 1:
        if len(clock) > 1 and _first():
            rate = (len(clock) - 2) / max(clock[-1] - clock[1], 1e-9)
            print(f"weft: {len(ids):,} tokens of prompt over {spread.world} ranks: first token after "
                  f"{clock[1] - clock[0]:.2f} s, then {rate:.1f} tokens/s", file=sys.stderr)  # fmt: skip
        part_ranks()
    return 0


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _say(text: str) -> None:
    """Print on one of the ranks."""
    if _first():
        print(text, end="", flush=True)


def _timed(ids: Iterator[int], clock: list[float]) -> Iterator[int]:
    """``ids``, and in ``clock`` when each of them came."""
    for i in ids:
        clock.append(time.perf_counter())
        yield i


def say_sample(checkpoint: Where, settings: Generate) -> str:
    """Show a few lines from a freshly trained model, and return what it wrote after the prompt."""
    with open_model(checkpoint, "cpu") as (model, tokenizer, _):
        ids = [int(i) for i in tokenizer.encode(settings.prompt)] or [tokenizer.eos]
        fresh = generate(model, ids, settings.tokens, tokenizer.eos, settings.temperature, settings.top_k)
        text = "".join(stream_text(tokenizer, fresh))
    console = Console(highlight=False, soft_wrap=True)
    console.rule("the model writes", style="dim", align="left")
    console.print(settings.prompt + text, markup=False)
    console.rule(style="dim")
    return text


def export_model(checkpoint: str, out: Path) -> Path:
    """Write the model under Hugging Face names into the new folder ``out``."""
    if out.exists():
        raise WeftError(f"--out {out} exists already; choose another folder")
    with open_model(checkpoint, "cpu") as (model, tokenizer, folder):
        values = {p.name: p.local for p in resident_state(model, model.mesh).held}
        export(values, model.shape, out, tokenizer_folder=folder, eos=tokenizer.eos)
    return out
