"""``weft bench``: which policy of a server would answer a load best, which modules tokens should take, and which
settings reach a loss first."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from weft.cli.arguments import AsJson, ModelName, PluginModules, Weights, import_plugins
from weft.cli.console import print_table, warn
from weft.cli.target import target_command
from weft.errors import UsageError

if TYPE_CHECKING:
    from weft.serve.policy_choice import Candidate

app = typer.Typer(
    help="Choose how to serve a load, study paths, and compare settings by the time to a loss.",
    no_args_is_help=True,
)
app.command("target")(target_command)

_data = (
    "random: random ids with the given lengths. sharegpt: random ids with "
    "lengths as in people's conversations. custom: a JSONL file."
)
DatasetName = Annotated[str, typer.Option(help=_data)]
DatasetPath = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="With custom: JSON lines with the key prompt."),
]
Requests = Annotated[int, typer.Option(min=1, help="Number of requests.")]
Rate = Annotated[
    float, typer.Option(min=1e-6, help="Requests per second; inf: all at once.")
]
_burst = (
    "How evenly requests arrive: 1 as a Poisson process, below 1 in bursts, "
    "above 1 more evenly."
)
Burstiness = Annotated[float, typer.Option(min=1e-3, help=_burst)]
InputLength = Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")]
OutputLength = Annotated[int, typer.Option(min=1, help="Tokens of an answer.")]
RangeRatio = Annotated[
    float,
    typer.Option(
        min=0, max=1, help="Range of lengths around these numbers, as a share."
    ),
]
PrefixLength = Annotated[
    int, typer.Option(min=0, help="Tokens of a common beginning of all prompts.")
]
_limits = "Count the requests that meet all limits, in ms, e.g. --goodput ttft:500 --goodput tpot:50."
Goodput = Annotated[list[str] | None, typer.Option(metavar="METRIC:MS", help=_limits)]
Percentiles = Annotated[str, typer.Option(help="Percentiles of times to print.")]
Seed = Annotated[int, typer.Option(help="Seed of lengths, prompts and arrivals.")]


@app.command("policies")
def policies_command(
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
        int,
        typer.Option(
            min=2, help="Number of requests whose steps are timed, three times."
        ),
    ] = 6,
    requests: Annotated[
        int, typer.Option(min=1, help="Answers at the same time, as in weft serve.")
    ] = 64,
    cache: Annotated[
        int, typer.Option(min=1, help="Tokens in the cache, as in weft serve.")
    ] = 65_536,
    weights: Weights = "float",
    plugin: PluginModules = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> int:
    """Say which policy and budget of weft serve would answer a load best, from a few timed requests."""
    import torch

    from weft.checkpoint.model import open_model, tokenizer_of
    from weft.generate.engine import Engine
    from weft.generate.policies import policy_of
    from weft.models.products import read_only
    from weft.serve import load_requests, policy_choice

    import_plugins(plugin)
    limits, percentiles = (
        load_requests.read_limits(goodput or []),
        load_requests.read_percentiles(metric_percentiles),
    )
    asked = load_requests.make_requests(
        dataset_name, num_prompts + timed, dataset_path, random_input_len, random_output_len, random_range_ratio,
        random_prefix_len, seed,
    )  # fmt: skip
    if len(asked) <= timed:
        raise UsageError(
            f"{len(asked)} requests are too few to time {timed} of them; give more, or --timed"
        )
    model, files, _ = open_model(
        checkpoint, "cuda" if torch.cuda.is_available() else "cpu", warn
    )
    read_only(model, weights)
    waits = load_requests.arrival_pauses(len(asked), request_rate, burstiness, seed)
    few, load = policy_choice.split_load(
        asked, waits, lambda: tokenizer_of(files, checkpoint), timed
    )

    def build(policy: str, budget: int) -> Engine:
        return Engine(model, cache, budget, requests, policy_of(policy))

    with Console(stderr=True).status(
        f"timing the steps of {timed} requests, three times"
    ) as status:
        curve = policy_choice.time_steps(build, few)
        status.update("simulating every policy")
        candidates = policy_choice.compare_policies(
            build, load, curve, percentiles, limits
        )
        most = (
            policy_choice.highest_rate(build, candidates[0], load, curve, limits)
            if limits
            else math.nan
        )
    if as_json:
        rows = [
            {
                "policy": candidate.policy,
                "budget": candidate.budget,
                **candidate.figures,
            }
            for candidate in candidates
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
    _show_candidates(candidates, percentiles[-1])
    best = candidates[0]
    print(
        f"weft serve --checkpoint {checkpoint} --policy {best.policy} --budget {best.budget} --requests {requests}"
    )
    if limits:
        rate = (
            f"up to {most:.2g} requests per second"
            if math.isfinite(most)
            else "even if all come at once"
        )
        print(f"{policy_choice.SHARE:.0%} of the requests meet the limits {rate}")
    return 0


def _show_candidates(candidates: "list[Candidate]", percentile: float) -> None:
    last = f"p{percentile:g}"
    names = {"request_goodput": "good/s", "output_throughput": "tok/s"}
    names |= {
        "mean_ttft_ms": "ttft ms",
        f"{last}_ttft_ms": last,
        "mean_itl_ms": "itl ms",
        f"{last}_itl_ms": last,
    }
    names["mean_e2el_ms"] = "e2el ms"
    names = {
        name: head for name, head in names.items() if name in candidates[0].figures
    }
    values = [[candidate.figures[name] for name in names] for candidate in candidates]
    figures = [
        [f"{value:.4g}" if value < 1000 else f"{value:,.0f}" for value in its]
        for its in values
    ]
    rows = [
        [candidate.policy, str(candidate.budget), *its]
        for candidate, its in zip(candidates, figures, strict=True)
    ]
    print_table(["policy", "budget", *names.values()], rows)


_study_text = "File with a text that the model has not learned."
_budgets = "Costs that a token's path may have at most, as shares of that of all big modules, with commas between."
_page = "Write a page with plots to this file."


@app.command("paths")
def paths_command(
    checkpoint: Annotated[str, ModelName],
    data: Annotated[Path, typer.Option(metavar="FILE", help=_study_text)],
    budgets: Annotated[str, typer.Option(help=_budgets)] = "0.25,0.5,0.75",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that are read.")] = 8192,
    window: Annotated[int, typer.Option(min=2, help="Tokens of a piece.")] = 128,
    out: Annotated[Path | None, typer.Option(metavar="PAGE.html", help=_page)] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> int:
    """Compare ways to choose each token's feed-forwards within a budget: an oracle, a router, one path, random paths.

    The model must have small feed-forwards (model.small_ffn).
    """
    from weft.checkpoint.model import open_model, tokenizer_of
    from weft.checkpoint.pruned_model import read_calibration_text
    from weft.generate.path_study import study_paths, write_study
    from weft.observe.run_page import PLOTLY, write_plotly
    from weft.writable import check_writable

    try:
        shares = [float(share) for share in budgets.split(",")]
    except ValueError:
        raise UsageError(
            f"--budgets {budgets} are no shares; give numbers with commas between"
        ) from None
    if out is not None:
        check_writable(out, "--out")
    text = read_calibration_text(data)
    model, files, _ = open_model(checkpoint, "cpu", warn)
    ids = tokenizer_of(files, checkpoint).prompt_ids(text)[: tokens + 1]
    with Console(stderr=True).status("reading") as status:
        study = study_paths(model, ids, shares, window, seed, status.update)
    if out is not None:
        write_plotly(write_study(study, checkpoint, out, PLOTLY).parent)
    if as_json:
        typer.echo(json.dumps(study.record()))
        return 0
    rows = []
    for row in study.budgets:
        losses = (row.oracle, row.mixed_oracle, row.router, row.fixed, row.random)
        rows.append([f"{row.budget:g}", *(f"{loss:.3f}" for loss in losses)])
    names = ("budget", "oracle", "oracle, together", "router", "one path", "random")
    print_table(names, rows)
    typer.echo(f"all big modules: {study.whole:.3f}")
    for layer, loss in enumerate(study.without):
        typer.echo(f"without layer {layer}: {loss - study.whole:+.3f}")
    return 0
