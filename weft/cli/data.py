"""``weft data``: make a corpus, and look at what a run would read."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from weft.cli.arguments import AsJson, DataPath, FromModel, Overrides, RecipeFile, Seed
from weft.cli.console import print_table
from weft.errors import UsageError, WeftError
from weft.observe.display import compact

app = typer.Typer(help="Make data for runs, and look at them.", no_args_is_help=True)


_pipeline = "A pipeline's TOML file (docs/how-to/curation.md), or one of Weft's by name, such as stdlib."
_workers = "Processes; by default one for each core. 0: all in this one."
_engine = (
    "What runs the tasks: processes of this host, or an executor that is installed."
)


@app.command("run")
def run_command(
    pipeline: Annotated[Path, typer.Argument(metavar="PIPELINE", help=_pipeline)],
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Folder to write to; a run that was cut off goes on."
        ),
    ],
    workers: Annotated[int | None, typer.Option(min=0, help=_workers)] = None,
    engine: Annotated[
        str, typer.Option(metavar="local|datatrove|ray", help=_engine)
    ] = "local",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> int:
    """Make a corpus: read, filter, deduplicate and tokenise documents, with a manifest, a card and a page."""
    from weft.curation.data_run import run_pipeline
    from weft.curation.read_pipeline import load_pipeline
    from weft.curation.run_text import progress_bar, result_json, result_rows

    loaded = load_pipeline(pipeline, overrides or ())
    with progress_bar() as progress:
        result = run_pipeline(loaded, out, workers, engine, progress)
    if as_json:
        typer.echo(json.dumps(result_json(result), indent=2, ensure_ascii=False))
    else:
        print_table(*result_rows(result))
    for note in result.notes:
        typer.echo(f"note: {note}", err=True)
    if result.problem:
        raise WeftError(result.problem)
    return 0


_measured = (
    "Tables of small runs (columns pool, tokens, epochs, loss), or folders of weft train, each on one pool "
    "([NAME=]FOLDER)."
)
_flops = (
    "Budget in floating-point operations; with --parameters, or by what the runs say."
)
_mixtures = "Table of small runs on mixtures: a column of weights for each domain."
_losses = (
    "With --mixtures: table of the runs' losses, if they stand in one of their own."
)
_target = "With --mixtures: column of the loss that is to be low."
_propose = (
    "Name this many small runs that would narrow the half-lives most, the best first."
)
_longest = "Most epochs of a run that --propose names; by default four times those of the longest run."
_size = "Number of tokens that a pool has in reality, if the small runs had a part of it; repeatable."


@app.command("preview")
def preview_command(
    recipe: RecipeFile,
    overrides: Overrides = None,
    origin: FromModel = None,
    data: DataPath = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Number of conversations to show.")
    ] = 3,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the conversations as a page, too."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show the first conversations as their chat template writes them, with the learned text in colour."""
    from weft.data.chat.preview import format_sample, preview_page, preview_samples
    from weft.pages import write
    from weft.recipe import load_recipe
    from weft.train.setup import recipe_tokenizer
    from weft.writable import check_writable

    if html is not None:
        check_writable(html, "--html")
    settings = load_recipe(recipe, overrides or (), origin=origin, data=data)
    shown, notes = preview_samples(settings.data, recipe_tokenizer(settings), samples)
    if as_json:
        typer.echo(
            json.dumps(
                [sample.as_json() for sample in shown], indent=2, ensure_ascii=False
            )
        )
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    if html is not None:
        typer.echo(
            write(html, preview_page(settings.name, settings.data, shown), "--html"),
            err=as_json,
        )
    if as_json:
        return 0
    console = Console(highlight=False)
    for sample in shown:
        console.print(f"[bold]{sample.place}[/]: {sample.facts}", soft_wrap=True)
        console.print(
            format_sample(sample, console.color_system is not None),
            soft_wrap=not console.is_terminal,
        )
        console.print()
    return 0


@app.command("split")
def split_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A .jsonl file, a folder of texts, an .npz file of arrays, or sklearn:digits.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder with a file for each client.")
    ],
    clients: Annotated[int, typer.Option(min=1, help="Number of clients.")] = 5,
    by: Annotated[
        str,
        typer.Option(
            metavar="even|dirichlet|classes|natural",
            help="How samples are divided, as in federated.partition.",
        ),
    ] = "even",
    alpha: Annotated[
        float, typer.Option(help="Parameter of --by dirichlet; small: clients differ.")
    ] = 0.5,
    classes: Annotated[
        int, typer.Option(min=1, help="Classes of each client with --by classes.")
    ] = 2,
    label: Annotated[
        str, typer.Option(metavar="FIELD", help="Field of a record with its class.")
    ] = "label",
    group: Annotated[
        str,
        typer.Option(
            metavar="FIELD",
            help="Field of a record with its group, for --by natural; of texts their folder.",
        ),
    ] = "folder",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> int:
    """Divide data among the clients of a federated experiment, a file for each."""
    from weft.errors import nearest
    from weft.federated.split_data import split_data

    kinds = ("even", "dirichlet", "classes", "natural")
    if by not in kinds:
        raise UsageError(f"--by {by!r} is not possible; {nearest(by, kinds)}")
    if alpha <= 0:
        raise UsageError(f"--alpha {alpha:g} is not above 0; give a larger one")
    shares = split_data(
        source, out, clients, by, label=label, group=group, alpha=alpha, classes=classes, seed=seed  # type: ignore[arg-type]
    )  # fmt: skip
    if as_json:
        rows = [share._asdict() | {"file": str(share.file)} for share in shares]
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return 0
    print_table(
        ("file", "samples", "classes"),
        [(str(share.file), f"{share.samples:,}", share.class_text) for share in shares],
    )
    return 0


@app.command("who")
def who_command(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="[DOCUMENT] RUN",
            help="A document (FILE, FILE:LINE or the id of its record), and the folder of a run.",
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option(
            min=1, help="List the documents of this step, in place of DOCUMENT."
        ),
    ] = None,
    most: Annotated[int, typer.Option(min=1, help="Number of lines to show.")] = 50,
    recipe: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The run's recipe, if its sources have addresses with passwords or signatures, which no run records.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show in which steps of a run a document was trained on, or which documents a step had."""
    from weft.errors import UsageError
    from weft.recipe import load_recipe
    from weft.train.document_use import RunDocuments, format_uses

    if len(names) != (2 if step is None else 1):
        raise UsageError(
            "give DOCUMENT and RUN, or RUN with --step N: weft data who docs/a.txt runs/small"
        )
    run = RunDocuments(Path(names[-1]), load_recipe(recipe) if recipe else None)
    if step is not None:
        held = run.of_step(step)
        if as_json:
            typer.echo(
                json.dumps(
                    [{"document": d.name, **d.use._asdict()} for d in held], indent=2
                )
            )
            return 0
        for document in held[:most]:
            use = document.use
            whose = "" if use.place is None else f", place {use.place} of {use.places}"
            typer.echo(
                f"sample {use.sample:,}{whose}: {document.name}, tokens {use.first:,} to {use.last - 1:,}, "
                f"epoch {use.epoch:,}"
            )
        if len(held) > most:
            typer.echo(f"and {len(held) - most:,} more (--most)")
        return 0
    documents = run.find(names[0])
    if as_json:
        listed = [
            {
                "document": d.name,
                "source": d.source,
                "tokens": d.tokens,
                "state": d.state,
                "uses": [use._asdict() for use in d.uses],
            }
            for d in documents
        ]
        typer.echo(json.dumps(listed, indent=2))
        return 0
    for used in documents:
        typer.echo(used.line())
        for line in format_uses(used.uses, used.tokens, most) if used.uses else ():
            typer.echo(line)
    return 0


@app.command("plan")
def data_plan_command(
    measured: Annotated[
        list[str] | None, typer.Argument(metavar="RUNS...", help=_measured)
    ] = None,
    tokens: Annotated[
        float | None, typer.Option(min=1, help="Budget in tokens.")
    ] = None,
    flops: Annotated[float | None, typer.Option(min=1, help=_flops)] = None,
    steps: Annotated[
        float | None, typer.Option(min=1, help="Budget in optimizer steps.")
    ] = None,
    parameters: Annotated[
        float | None, typer.Option(min=1, help="Number of the model's parameters.")
    ] = None,
    step_tokens: Annotated[
        float | None, typer.Option(min=1, help="Tokens of an optimizer step.")
    ] = None,
    size: Annotated[
        list[str] | None, typer.Option(metavar="POOL=TOKENS", help=_size)
    ] = None,
    mixtures: Annotated[
        str | None, typer.Option(metavar="TABLE", help=_mixtures)
    ] = None,
    losses: Annotated[str | None, typer.Option(metavar="TABLE", help=_losses)] = None,
    target: Annotated[str | None, typer.Option(metavar="COLUMN", help=_target)] = None,
    propose: Annotated[int, typer.Option(min=0, max=1000, help=_propose)] = 0,
    longest: Annotated[float | None, typer.Option(min=1, help=_longest)] = None,
    as_json: AsJson = False,
) -> int:
    """Say which pools to train on, and how often or in which mixture, by the losses of small runs."""
    if mixtures is not None:
        if measured or target is None:
            raise UsageError(
                "--mixtures needs --target, and no RUNS; docs/how-to/data-plan.md has both forms"
            )
        return _best_mixture(mixtures, losses, target, as_json)
    from weft.curation.data_plan import budget_samples, plan_data, wear_text
    from weft.curation.measured_runs import pool_sizes, read_measured
    from weft.curation.repetition_design import propose_runs
    from weft.curation.repetition_fit import fit_repetition_law

    if not measured:
        raise UsageError(
            "give tables or folders of small runs; docs/how-to/data-plan.md says which"
        )
    read = read_measured(measured)
    samples = budget_samples(read, tokens, flops, steps, parameters, step_tokens)
    fitted = fit_repetition_law(read.runs).with_sizes(pool_sizes(size or []))
    plan = plan_data(fitted, samples, read.runs)
    proposed = propose_runs(fitted, read.runs, propose, longest)
    if as_json:
        next_runs = {"next": [asdict(run) for run in proposed]} if propose else {}
        typer.echo(json.dumps(plan.as_json() | next_runs, indent=2))
        return 0
    print_table(
        ("pool", "tokens", "exponent", "half-life in epochs"),
        [
            (row.pool, compact(row.size), row.exponent.text(), wear_text(row.half_life))
            for row in plan.utilities
        ],
    )
    typer.echo(
        f"\nbudget {compact(samples)} tokens; irreducible loss {plan.floor.text('.3f')}; "
        f"a run is off by {plan.noise:.2%}"
    )
    print_table(
        ("train on", "epochs of each", "expected loss", "best in"),
        [
            (
                " + ".join(row.pools),
                f"{row.epochs:.3g}",
                row.loss.text(".4f"),
                f"{row.chance:.0%}",
            )
            for row in plan.choices
        ],
    )
    typer.echo(f"\nwhy: {plan.reason}")
    for note in plan.notes:
        typer.echo(f"note: {note}")
    for run in proposed:
        typer.echo(f"next: {run.text()}")
    return 0


@app.command("classify")
def classify_command(
    positive: Annotated[
        list[str],
        typer.Option(
            metavar="PATH",
            help="Good texts: a file, folder or glob, or 'stdlib'. Repeatable.",
        ),
    ],
    negative: Annotated[
        list[str], typer.Option(metavar="PATH", help="Bad texts. Repeatable.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="Write the classifier here, and a report beside it."
        ),
    ],
    field: Annotated[
        str, typer.Option(help="Field of records (JSON lines, CSV ...) with the text.")
    ] = "text",
    group: Annotated[
        str,
        typer.Option(
            help="Field of records with the group that is held out as a whole, such as a site."
        ),
    ] = "",
    held_out: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=0.9,
            help="Share of the groups that are judged, not trained on.",
        ),
    ] = 0.2,
    words: Annotated[
        int, typer.Option(min=0, max=5, help="Words of the longest n-gram.")
    ] = 2,
    characters: Annotated[
        int,
        typer.Option(min=0, max=8, help="Bytes of the longest n-gram of characters."),
    ] = 4,
    bits: Annotated[
        int, typer.Option(min=8, max=26, help="Features: 2 to this power.")
    ] = 18,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> int:
    """Train a classifier of texts on good and bad examples, for the operator 'classifier' of data pipelines.

    It is judged on groups that it was not trained on: folders at the top of a path (packages), or files without one.
    """
    from weft.curation.example_texts import examples_of
    from weft.curation.hashed_ngrams import NgramSettings
    from weft.curation.ngram_classifier import report_file, save_classifier
    from weft.curation.train_classifier import train_classifier
    from weft.writable import check_writable

    check_writable(out, "--out")
    settings = NgramSettings(words=words, characters=characters, bits=bits)
    trained = train_classifier(
        examples_of(positive, field, group),
        examples_of(negative, field, group),
        settings,
        held_out,
        seed,
    )
    report = {"positive": positive, "negative": negative, **trained.report.as_json()}
    save_classifier(trained.classifier, out, report)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return 0
    for line in trained.report.lines():
        typer.echo(line)
    typer.echo(f"wrote {out} and {report_file(out)}")
    return 0


_folders = "Folders of Parquet files, or such files."
_rows = "Rows of a table that are looked for in another one; 0: all of them."
_storage = "Price of a gigabyte that is kept for a month."
_maintenance = (
    "Price of a gigabyte in a month for scans, back-ups and rules of privacy."
)
_reads = "How often a table is asked for in a month."
_compute = "Price of a gigabyte that is read or written to make a table again."
_bandwidth = "Gigabytes in a second at which a table is made again."
_latency = "Seconds at most until a deleted table is there again."


@app.command("contained")
def contained_command(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help=_folders)],
    whole_folders: Annotated[
        bool,
        typer.Option(
            "--folders", help="Every folder is one table; else every file is."
        ),
    ] = False,
    rows: Annotated[int, typer.Option(min=0, help=_rows)] = 64,
    seed: Annotated[int, typer.Option(help="Seed by which rows are drawn.")] = 0,
    plan: Annotated[
        bool, typer.Option(help="Say which tables are cheaper to delete than to keep.")
    ] = True,
    storage: Annotated[float, typer.Option(min=0, help=_storage)] = 0.023,
    maintenance: Annotated[float, typer.Option(min=0, help=_maintenance)] = 0.0,
    reads: Annotated[float, typer.Option(min=0, help=_reads)] = 0.1,
    compute: Annotated[float, typer.Option(min=0, help=_compute)] = 0.005,
    bandwidth: Annotated[float, typer.Option(min=1e-9, help=_bandwidth)] = 0.2,
    latency: Annotated[float | None, typer.Option(min=0, help=_latency)] = None,
    as_json: AsJson = False,
) -> int:
    """Say which tables are contained in others, and which of the contained ones can be deleted. Deletes nothing."""
    import math

    from weft.curation.containment import containment_graph
    from weft.curation.containment_report import containment_json, containment_lines
    from weft.curation.deletion_plan import TableCosts, plan_deletions
    from weft.curation.table_footers import read_lake_tables

    tables, unread = read_lake_tables(folders, whole_folders)
    graph = containment_graph(tables, rows or None, seed)
    costs = TableCosts(
        storage,
        maintenance,
        reads,
        compute,
        bandwidth,
        math.inf if latency is None else latency,
    )
    planned = plan_deletions(graph, costs) if plan else None
    for name, reason in unread.items():
        typer.echo(f"note: {name} is left out: {reason}", err=True)
    if as_json:
        report = containment_json(graph, planned, unread)
        typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        for line in containment_lines(graph, planned):
            typer.echo(line)
    return 1 if unread else 0


def _best_mixture(mixtures: str, losses: str | None, target: str, as_json: bool) -> int:
    from weft.curation.mixture_regression import best_mixture
    from weft.curation.mixture_runs import read_mixture_runs

    runs = read_mixture_runs(mixtures, losses, target)
    choice = best_mixture(runs.domains, runs.weights, runs.losses)
    if as_json:
        typer.echo(json.dumps(asdict(choice), indent=2))
        return 0
    mean = dict(zip(runs.domains, runs.weights.mean(0), strict=True))
    ranked = sorted(choice.weights, key=lambda name: -choice.weights[name])
    print_table(
        ("domain", "weight", "mean of the runs"),
        [(name, f"{choice.weights[name]:.3f}", f"{mean[name]:.3f}") for name in ranked],
    )
    typer.echo(
        f"\n{target}: {choice.loss:.4f} +- {choice.deviation:.4f} expected, "
        f"{choice.prior_loss:.4f} with the mean of the runs, {choice.best_run:.4f} in the best run"
    )
    typer.echo(
        f"each of the {len(runs.losses)} runs predicted by the others: rank correlation {choice.rank_correlation:.3f}"
    )
    return 0


_searched = (
    "Tables of runs (columns parameters, loss, and one for each setting), folders of weft "
    "train, or of its sweeps."
)
_over = (
    "Column of the tables that grows from size to size, such as members of an ensemble."
)


@app.command("asymptote")
def asymptote_command(
    searched: Annotated[list[str], typer.Argument(metavar="RUNS...", help=_searched)],
    over: Annotated[str, typer.Option(metavar="COLUMN", help=_over)] = "parameters",
    as_json: AsJson = False,
) -> int:
    """Say which settings are best at each size of a model, and which loss a model of unlimited size would reach."""
    from weft.curation.settings_search import read_searched_runs, search_settings

    search = search_settings(read_searched_runs(searched, over))
    if as_json:
        typer.echo(json.dumps(search.as_json(), indent=2))
        return 0
    names = list(dict.fromkeys(name for run in search.best for name in run.settings))
    print_table(
        (over, "loss", *names),
        [
            (
                compact(run.size),
                f"{run.loss:.4f}",
                *(f"{run.settings[n]:g}" if n in run.settings else "-" for n in names),
            )
            for run in search.best
        ],
    )
    if (law := search.asymptote) is not None:
        typer.echo(
            f"\nasymptote {law.floor:.4f} ({law.low:.4f} to {law.high:.4f}), approached with exponent "
            f"{law.exponent:.3g}; a run is off by {law.noise:.2%}"
        )
    for note in search.notes:
        typer.echo(f"note: {note}")
    return 0


_sizes = "Height and width to which images are scaled, e.g. 32,32. If not given: all must have one size."
_widths = (
    "Channels at each resolution; from one to the next height and width are halved."
)


@app.command("autoencoder")
def autoencoder_command(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Images, as data.path names them.")
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write to.")],
    size: Annotated[str, typer.Option(metavar="H,W", help=_sizes)] = "",
    latents: Annotated[int, typer.Option(min=1, help="Values of a latent pixel.")] = 4,
    widths: Annotated[str, typer.Option(metavar="N,...", help=_widths)] = "16,32",
    steps: Annotated[int, typer.Option(min=1, help="Steps of 64 images each.")] = 1000,
    rate: Annotated[
        float, typer.Option(min=1e-9, help="Highest learning rate.")
    ] = 5e-3,
    seed: Seed = 0,
) -> int:
    """Train a small autoencoder of images, behind which a diffusion transformer can learn (data.settings.encoder)."""
    from weft.data.pictures import read_pictures
    from weft.diffusion.latent_pictures import small_autoencoder, train_autoencoder
    from weft.models.autoencoder_files import save_autoencoder
    from weft.new_folder import check_new

    check_new(out)
    pictures = read_pictures(path, whole_numbers("--size", size))
    channels = tuple(whole_numbers("--widths", widths))
    model = small_autoencoder(pictures, latents, channels, seed)
    errors: list[float] = []

    def passed(step: int, error: float) -> None:
        errors.append(error)
        if step % max(1, steps // 10) == 0:
            typer.echo(f"step {step}/{steps}  squared error {error:.4f}", err=True)

    settings = train_autoencoder(model, pictures, steps, rate, seed, passed)
    save_autoencoder(model, out)
    sides = [side // settings.factor for side in pictures.pixels.shape[2:]]
    shown = " x ".join(map(str, (settings.latent_channels, *sides)))
    typer.echo(
        f"{out}: an autoencoder with latents of {shown}; train with --set data.settings.encoder={out}"
    )
    return 0


def whole_numbers(option: str, text: str) -> list[int]:
    """Return the numbers above 0 in ``text``, with commas between; none in an empty text.

    Raises :class:`UsageError`, which names the command's option ``option``, for other text.
    """
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isdecimal() and len(word) < 6 and int(word) for word in words):
        raise UsageError(f"{option} {text} should be whole numbers with commas between, such as 16,32")  # fmt: skip
    return [*map(int, words)]
