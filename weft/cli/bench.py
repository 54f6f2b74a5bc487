"""``weft bench``: how fast a server answers under load."""

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from weft.cli.arguments import AsJson, read_keys
from weft.errors import UsageError, WeftError

app = typer.Typer(help="Measure a server under load.", no_args_is_help=True)

_data = "random: ids, lengths as given. sharegpt: ids, lengths as people's talks have. custom: a JSONL file."
_burst = "How evenly: 1 as Poisson's, below 1 in bursts, above 1 more evenly."
_limits = "Count the requests that meet all limits, in ms, e.g. --goodput ttft:500 --goodput tpot:50."


@app.callback()
def _bench() -> None:
    """A group, although it has one command."""


@app.command()
def serve(
    base_url: Annotated[str, typer.Option(help="The server, also one that is not Weft's.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="A name that the server knows; without it its first one.")] = None,
    api_key: Annotated[Path | None, typer.Option(metavar="FILE", help="A file whose first line is a key.")] = None,
    dataset_name: Annotated[str, typer.Option(help=_data)] = "random",
    dataset_path: Annotated[Path | None, typer.Option(metavar="FILE", help="Lines of JSON with prompt.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests.")] = 100,
    request_rate: Annotated[float, typer.Option(min=1e-6, help="Requests per second; inf: all at once.")] = float(
        "inf"
    ),
    burstiness: Annotated[float, typer.Option(min=1e-3, help=_burst)] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Requests at a time at most.")] = None,
    random_input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 256,
    random_output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    random_range_ratio: Annotated[float, typer.Option(min=0, max=1, help="How far lengths vary.")] = 0.0,
    random_prefix_len: Annotated[int, typer.Option(min=0, help="Tokens that all prompts begin with.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers of the whole length.")] = False,
    goodput: Annotated[list[str] | None, typer.Option(metavar="METRIC:MS", help=_limits)] = None,
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles of all times.")] = "50,90,99",
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before, which do not count.")] = 1,
    seed: Annotated[int, typer.Option(help="Of lengths, prompts and arrivals.")] = 0,
    as_json: AsJson = False,
) -> int:
    """Ask a server many times and say how long it takes, in the words of vllm bench serve."""
    try:
        from weft.serve import load
    except ImportError as error:
        raise UsageError(f"measuring a server needs the package {error.name}: pip install 'weft[serve]'") from None
    limits = load.read_limits(goodput or [])
    percentiles = load.read_percentiles(metric_percentiles)
    asks = load.make_asks(
        dataset_name, num_prompts + num_warmups, dataset_path, random_input_len, random_output_len, random_range_ratio,
        random_prefix_len, seed,
    )  # fmt: skip
    key = read_keys(api_key)[0] if api_key else None
    target = load.Target(base_url.rstrip("/").removesuffix("/v1"), model, key, ignore_eos)
    waits = load.pauses(len(asks[:num_prompts]), request_rate, burstiness, seed)

    async def measure() -> tuple[list[load.Outcome], float]:
        early = asks[num_prompts:]  # other ones, so that no prefix of those that count is known
        await load.run(target, early, [0.0] * len(early), 1)
        return await load.run(target, asks[:num_prompts], waits, max_concurrency)

    found = load.summary(*asyncio.run(measure()), percentiles, limits)
    if as_json:
        print(json.dumps(found))
    else:
        _show(found)
    if not found["completed"]:
        raise WeftError(f"no request was answered: {'; '.join(found['errors'][:3])}")
    return 0


def _show(found: dict[str, object]) -> None:
    table = Table(show_header=False)
    for name, value in found.items():
        if name != "errors":
            table.add_row(name, f"{value:,.2f}" if isinstance(value, float) else f"{value:,}")
    Console().print(table)
    for error in found["errors"][:3]:  # type: ignore[index]
        print(f"an error: {error}")
