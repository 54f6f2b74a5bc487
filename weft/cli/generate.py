"""``weft generate``: continue a text on one device, or a long one on several."""

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.cli.arguments import Draft, Ema, ModelName, Weights
from weft.cli.console import warn
from weft.errors import UsageError
from weft.train.launch import launch
from weft.train.ranks import in_ranks, joined

if TYPE_CHECKING:  # `weft --help` does not wait for PyTorch
    from weft.checkpoint.s3 import Where
    from weft.recipe import Recipe

_chat = "The prompt is what a user says (or a .json file with messages): apply the chat template, print the answer."

_layout = 'Ranks for long prompts, e.g. "cp=4"; each has the model, with "cp=4,ep=4" but a part of its experts.'

_rest = "Where a mixture's experts rest that are not in use: a folder on a local disk, or host."

#: Seconds that ranks wait for each other.
WAIT_S = 1800


def generate(
    checkpoint: Annotated[str, ModelName],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(metavar="FILE", help="A file with it; not printed.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help=_chat)] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: what the model is told first.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 120,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Sample among this many; 0 means all.")] = 40,
    top_p: Annotated[float, typer.Option(max=1, help="Sample among the likeliest that make up this much.")] = 1.0,
    min_p: Annotated[float, typer.Option(min=0, max=1, help="Sample what is so likely beside the likeliest.")] = 0.0,
    repetition: Annotated[float, typer.Option(help="Make what has been seen less likely, above 1.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End where this comes; repeatable.")] = None,
    seed: int = 0,
    ema: Ema = False,
    weights: Weights = "float",
    draft: Draft = "",
    layout: Annotated[str | None, typer.Option(help=_layout)] = None,
    experts_in: Annotated[str | None, typer.Option(metavar="WHERE", help=_rest)] = None,
    resident: Annotated[float, typer.Option(min=0, max=1, help="The share of them that memory has room for.")] = 0.5,
) -> int:
    """Continue a text with a trained model; a long one on several ranks, which cut it and its keys and values."""
    import torch

    from weft.checkpoint.model import open_model, tokenizer_of
    from weft.checkpoint.weights import open_pretrained
    from weft.data.chat.encode import prompt_ids, read_messages
    from weft.generate import engine
    from weft.generate.draft import drafter_for
    from weft.generate.sampling import Sampling
    from weft.generate.spread import check_spread, mesh_of_rank
    from weft.generate.text import stream_text
    from weft.layout.layout import Layout
    from weft.memory.experts import RestingExperts
    from weft.models.products import read_only

    if (prompt is None) == (prompt_file is None):
        raise UsageError("give either --prompt TEXT or --prompt-file FILE")
    how = Sampling(temperature, top_k, top_p, min_p, repetition, seed=seed)
    spread, device = Layout.parse(layout or ""), "cuda" if torch.cuda.is_available() else "cpu"
    check_spread(spread)
    if experts_in == "":
        raise UsageError("--experts-in is empty; give a folder on a local disk")
    if experts_in and spread.ep > 1:
        raise UsageError("--experts-in is for ranks that have all experts; leave it out, or ep in --layout")
    if experts_in == "host" and device == "cpu":
        raise UsageError("--experts-in host is for models on a GPU; on the CPU give a folder on a local disk")
    if spread.world > 1 and not in_ranks():
        check_spread(spread, open_pretrained(checkpoint).shape)
        return launch(sys.argv[1:], spread.world)
    if system is not None and not chat:
        raise UsageError("--system is for --chat, whose template says where it belongs")
    try:
        text = prompt if prompt_file is None else prompt_file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt-file {prompt_file} cannot be read: {error}") from None
    assert text is not None
    messages, tools = [{"role": "user", "content": text}], None
    if chat and prompt_file is not None and prompt_file.suffix == ".json":
        messages, tools = read_messages(text)
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    with joined(device, WAIT_S) if spread.world > 1 else nullcontext():
        if spread.world > 1 and device == "cuda":
            device = f"cuda:{torch.cuda.current_device()}"
        resting = RestingExperts(None if experts_in == "host" else Path(experts_in), resident) if experts_in else None
        if resting and resting.file and resting.file.note:
            warn(resting.file.note)
        model, files = open_model(checkpoint, device, warn, ema, mesh_of_rank(spread, device), resting)
        tokenizer = tokenizer_of(files, checkpoint)
        check_spread(spread, model.shape)
        read_only(model, weights)
        ids = prompt_ids(tokenizer, messages if chat else text, chat, checkpoint, tools)
        clock = [time.perf_counter()]
        drafter = drafter_for(draft, model, warn)
        fresh = _timed(engine.generate(model, ids, tokens, tokenizer.stops, how, spread, drafter), clock)
        if prompt and not chat:
            _say(prompt)
        for piece in stream_text(tokenizer, fresh, stop or ()):
            _say(piece)
        _say("\n")
        if spread.world > 1 and len(clock) > 1 and _first():
            rate = (len(clock) - 2) / max(clock[-1] - clock[1], 1e-9)
            print(f"weft: {len(ids):,} tokens of prompt over {spread.world} ranks: first token after "
                  f"{clock[1] - clock[0]:.2f} s, then {rate:.1f} tokens/s", file=sys.stderr)  # fmt: skip
        if resting is not None and _first():
            print(f"weft: {resting.report()}", file=sys.stderr)
    return 0


def _first() -> bool:
    import torch.distributed as dist

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


def say_samples(checkpoint: "Where", recipe: "Recipe") -> list[dict[str, str]]:
    """Show what a trained model writes, beside what that of ``model.from`` does if asked for; prompts and texts."""
    from weft.generate.samples import samples

    settings, origin = recipe.generate, recipe.model.origin
    assert settings is not None
    written = samples(checkpoint, settings, warn, recipe.optimizer.use_ema)
    found = [{"prompt": p, "text": t} for p, t in zip(settings.all_prompts, written, strict=True)]
    console = Console(highlight=False, soft_wrap=True)
    if settings.before and origin is not None:
        for shown, before in zip(found, samples(origin, settings, warn), strict=True):
            shown["before"] = before
        table = Table("asked", f"before, by {origin}", "after", show_lines=True)
        for shown in found:
            table.add_row(*(Text(shown[key].strip()) for key in ("prompt", "before", "text")))
        Console(highlight=False).print(table)
        return found
    for shown in found:
        console.rule("the model writes", style="dim", align="left")
        console.print(shown["prompt"] + ("\n" if settings.chat else "") + shown["text"], markup=False)
    console.rule(style="dim")
    return found
