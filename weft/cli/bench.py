"""``weft bench``: how fast a server answers under load, and which policy would answer a load best."""

import asyncio
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from weft.cli.arguments import AsJson, ModelName, Weights, read_keys
from weft.cli.console import print_table, warn
from weft.errors import UsageError, WeftError

if TYPE_CHECKING:
    from weft.measure.choose import Candidate

app = typer.Typer(
    help="Measure a server under load, or choose how to serve one.",
    no_args_is_help=True,
)

_data = "random: ids, lengths as given. sharegpt: ids, lengths as people's talks have. custom: a JSONL file."
DatasetName = Annotated[str, typer.Option(help=_data)]
DatasetPath = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Lines of JSON with prompt.")
]
Requests = Annotated[int, typer.Option(min=1, help="Requests.")]
Rate = Annotated[
    float, typer.Option(min=1e-6, help="Requests per second; inf: all at once.")
]
_burst = "How evenly: 1 as Poisson's, below 1 in bursts, above 1 more evenly."
Burstiness = Annotated[float, typer.Option(min=1e-3, help=_burst)]
InputLength = Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")]
OutputLength = Annotated[int, typer.Option(min=1, help="Tokens of an answer.")]
RangeRatio = Annotated[float, typer.Option(min=0, max=1, help="How far lengths vary.")]
PrefixLength = Annotated[
    int, typer.Option(min=0, help="Tokens that all prompts begin with.")
]
_limits = "Count the requests that meet all limits, in ms, e.g. --goodput ttft:500 --goodput tpot:50."
Goodput = Annotated[list[str] | None, typer.Option(metavar="METRIC:MS", help=_limits)]
Percentiles = Annotated[str, typer.Option(help="Percentiles of all times.")]
Seed = Annotated[int, typer.Option(help="Of lengths, prompts and arrivals.")]


@app.command()
def serve(
    base_url: Annotated[
        str, typer.Option(help="The server, also one that is not Weft's.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        typer.Option(help="A name that the server knows; without it its first one."),
    ] = None,
    api_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file whose first line is a key."),
    ] = None,
    dataset_name: DatasetName = "random",
    dataset_path: DatasetPath = None,
    num_prompts: Requests = 100,
    request_rate: Rate = float("inf"),
    burstiness: Burstiness = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time at most.")
    ] = None,
    random_input_len: InputLength = 256,
    random_output_len: OutputLength = 64,
    random_range_ratio: RangeRatio = 0.0,
    random_prefix_len: PrefixLength = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers of the whole length.")
    ] = False,
    goodput: Goodput = None,
    metric_percentiles: Percentiles = "50,90,99",
    num_warmups: Annotated[
        int, typer.Option(min=0, help="Requests before, which do not count.")
    ] = 1,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> int:
    """Ask a server many times and say how long it takes, in the words of vllm bench serve."""
    try:
        from weft.measure import asks, load
    except ImportError as error:
        raise UsageError(
            f"measuring a server needs the package {error.name}: pip install 'weft[serve]'"
        ) from None
    limits = asks.read_limits(goodput or [])
    percentiles = asks.read_percentiles(metric_percentiles)
    asked = asks.make_asks(
        dataset_name, num_prompts + num_warmups, dataset_path, random_input_len, random_output_len, random_range_ratio,
        random_prefix_len, seed,
    )  # fmt: skip
    key = read_keys(api_key)[0] if api_key else None
    target = load.Target(
        base_url.rstrip("/").removesuffix("/v1"), model, key, ignore_eos
    )
    waits = asks.pauses(len(asked[:num_prompts]), request_rate, burstiness, seed)

    async def measure() -> tuple[list[asks.RequestOutcome], float]:
        # other ones, so that no prefix of those that count is known
        early = asked[num_prompts:]
        await load.run(target, early, [0.0] * len(early), 1)
        return await load.run(target, asked[:num_prompts], waits, max_concurrency)

    found = asks.summary(*asyncio.run(measure()), percentiles, limits)
    if as_json:
        print(json.dumps(found))
    else:
        _show(found)
    if not found["completed"]:
        raise WeftError(f"no request was answered: {'; '.join(found['errors'][:3])}")
    return 0


@app.command()
def policies(
    checkpoint: Annotated[str, ModelName],
    dataset_name: DatasetName = "random",
    dataset_path: DatasetPath = None,
    num_prompts: Requests = 200,
    request_rate: Rate = float("inf"),
    burstiness: Burstiness = 1.0,
    random_input_len: InputLength = 256,
    random_output_len: OutputLength = 64,
    random_range_ratio: RangeRatio = 0.0,
    random_prefix_len: PrefixLength = 0,
    goodput: Goodput = None,
    metric_percentiles: Percentiles = "50,90,99",
    timed: Annotated[
        int, typer.Option(min=2, help="Requests whose steps are timed, three times.")
    ] = 6,
    requests: Annotated[
        int, typer.Option(min=1, help="As weft serve has it: answers at the same time.")
    ] = 64,
    cache: Annotated[
        int, typer.Option(min=1, help="As weft serve has it: tokens of the cache.")
    ] = 65_536,
    weights: Weights = "float",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> int:
    """Say which policy and budget of weft serve would answer a load best, from a few timed requests."""
    import torch

    from weft.checkpoint.model import open_model, tokenizer_of
    from weft.generate.engine import Engine
    from weft.generate.policies import policy_of
    from weft.measure import asks, choose
    from weft.models.products import read_only

    limits, percentiles = (
        asks.read_limits(goodput or []),
        asks.read_percentiles(metric_percentiles),
    )
    asked = asks.make_asks(
        dataset_name, num_prompts + timed, dataset_path, random_input_len, random_output_len, random_range_ratio,
        random_prefix_len, seed,
    )  # fmt: skip
    if len(asked) <= timed:
        raise UsageError(
            f"{len(asked)} requests are too few to time {timed} of them; give more, or --timed"
        )
    model, files = open_model(
        checkpoint, "cuda" if torch.cuda.is_available() else "cpu", warn
    )
    read_only(model, weights)
    waits = asks.pauses(len(asked), request_rate, burstiness, seed)
    few, load = choose.requests_of(
        asked, waits, lambda: tokenizer_of(files, checkpoint), timed
    )

    def build(policy: str, budget: int) -> Engine:
        return Engine(model, cache, budget, requests, policy_of(policy))

    with Console(stderr=True).status(
        f"timing the steps of {timed} requests, three times"
    ) as status:
        curve = choose.time_steps(build, few)
        status.update("simulating every policy")
        found = choose.compare(build, load, curve, percentiles, limits)
        most = (
            choose.most_requests(build, found[0], load, curve, limits)
            if limits
            else math.nan
        )
    if as_json:
        rows = [
            {"policy": one.policy, "budget": one.budget, **one.figures} for one in found
        ]
        print(
            json.dumps(
                {
                    "candidates": rows,
                    "most_requests_per_second": most if math.isfinite(most) else None,
                }
            )
        )
        return 0
    _show_candidates(found, percentiles[-1])
    best = found[0]
    print(
        f"weft serve --checkpoint {checkpoint} --policy {best.policy} --budget {best.budget} --requests {requests}"
    )
    if limits:
        rate = (
            f"up to {most:.2g} requests per second"
            if math.isfinite(most)
            else "even if all come at once"
        )
        print(f"{choose.SHARE:.0%} of the requests meet the limits {rate}")
    return 0


def _show_candidates(found: "list[Candidate]", percentile: float) -> None:
    last = f"p{percentile:g}"
    names = {"request_goodput": "good/s", "output_throughput": "tok/s"}
    names |= {
        "mean_ttft_ms": "ttft ms",
        f"{last}_ttft_ms": last,
        "mean_itl_ms": "itl ms",
        f"{last}_itl_ms": last,
    }
    names["mean_e2el_ms"] = "e2el ms"
    names = {name: head for name, head in names.items() if name in found[0].figures}
    values = [[one.figures[name] for name in names] for one in found]
    figures = [
        [f"{value:.4g}" if value < 1000 else f"{value:,.0f}" for value in its]
        for its in values
    ]
    rows = [
        [one.policy, str(one.budget), *its]
        for one, its in zip(found, figures, strict=True)
    ]
    print_table(["policy", "budget", *names.values()], rows)


def _show(found: dict[str, object]) -> None:
    table = Table(show_header=False)
    for name, value in found.items():
        if name != "errors":
            table.add_row(
                name, f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
            )
    Console().print(table)
    for error in found["errors"][:3]:  # type: ignore[index]
        print(f"an error: {error}")
