"""``weft profile``: bound by launches or by compute, from traces."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.arguments import AsJson, ModelName
from weft.cli.console import print_table, warn
from weft.errors import UsageError

_traces = (
    "Traces of torch.profiler (export_chrome_trace); give several in the "
    "order of growing batch sizes."
)
_batches = "Batch sizes to record, separated by commas."


def profile_command(
    traces: Annotated[
        list[Path] | None, typer.Argument(metavar="[TRACE]...", help=_traces)
    ] = None,
    checkpoint: Annotated[str | None, ModelName] = None,
    batches: Annotated[str, typer.Option(help=_batches)] = "1,4,16,64",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 64,
    steps: Annotated[
        int, typer.Option(min=1, help="Tokens to generate for each text.")
    ] = 16,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="The folder for new traces.")
    ] = Path("traces"),
    as_json: AsJson = False,
) -> int:
    """Say what a program waits for, from existing traces, or from new traces of --checkpoint while it generates."""
    from weft.observe.launches import knee, read_launches

    if bool(traces) == bool(checkpoint):
        raise UsageError("give traces to read, or --checkpoint MODEL to record some")
    if checkpoint:
        import torch

        from weft.checkpoint.model import open_model
        from weft.generate.decoding_trace import trace_decoding

        if not all(word.isdecimal() and int(word) for word in batches.split(",")):
            raise UsageError(f"--batches {batches}: give numbers, for instance 1,4,16")
        model, *_ = open_model(
            checkpoint, "cuda" if torch.cuda.is_available() else "cpu", warn, False
        )
        traces = [
            trace_decoding(model, int(batch), prompt, steps, out)
            for batch in batches.split(",")
        ]
    traces_read = [read_launches(trace) for trace in traces or ()]
    if as_json:
        print(
            json.dumps(
                [
                    asdict(launches) | {"verdict": launches.verdict}
                    for launches in traces_read
                ]
            )
        )
        return 0
    rows = []
    for launches in traces_read:
        times = (
            f"{1e3 * launches.seconds:.1f}",
            f"{launches.kernels:,}",
            f"{launches.waited / 1e3:.2f}",
            f"{launches.queued:.1f}",
        )
        rows.append(
            (
                launches.name,
                *times,
                f"{launches.mean:.1f}",
                f"{launches.busy:.0%}" if launches.kernels else "-",
            )
        )
    print_table(
        (
            "trace",
            "ms",
            "kernels",
            "TKLQT ms",
            "per kernel us",
            "kernel or operator us",
            "device busy",
        ),
        rows,
    )
    for launches in traces_read:
        print(f"{launches.name}: {launches.verdict}")
    if len(traces_read) > 1 and traces_read[0].kernels:
        at = knee(traces_read)
        print(
            f"compute-bound from {at.name} on" if at else "launch-bound in all of them"
        )
    return 0
