"""``weft profile``: bound by launches or by compute, from traces."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.arguments import AsJson, ModelName
from weft.cli.console import print_table, warn
from weft.errors import UsageError

if TYPE_CHECKING:
    from weft.observe.kernel_use import DeviceUse

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
    top: Annotated[
        int, typer.Option(min=0, help="Operators to list for each trace of a device.")
    ] = 10,
    as_json: AsJson = False,
) -> int:
    """Say what a program waits for, from existing traces, or from new traces of --checkpoint while it generates."""
    from weft.observe.kernel_use import device_use
    from weft.observe.launches import knee, launches_of, trace_events

    if bool(traces) == bool(checkpoint):
        raise UsageError("give traces to read, or --checkpoint MODEL to record some")
    if checkpoint:
        import torch

        from weft.checkpoint.model import open_model
        from weft.generate.decoding_trace import trace_decoding
        from weft.writable import check_writable

        check_writable(out, "--out", folder=True)
        if not all(word.isdecimal() and int(word) for word in batches.split(",")):
            raise UsageError(f"--batches {batches}: give numbers, for instance 1,4,16")
        model, *_ = open_model(
            checkpoint, "cuda" if torch.cuda.is_available() else "cpu", warn, False
        )
        traces = [
            trace_decoding(model, int(batch), prompt, steps, out)
            for batch in batches.split(",")
        ]
    traces_read, uses = [], []
    for trace in traces or ():
        events = trace_events(trace)
        traces_read.append(launches_of(trace, events))
        uses.append(device_use(events))
    if as_json:
        print(
            json.dumps(
                [
                    asdict(launches)
                    | {"verdict": launches.verdict, "device": use and asdict(use)}
                    for launches, use in zip(traces_read, uses, strict=True)
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
    for launches, use in zip(traces_read, uses, strict=True):
        print(f"{launches.name}: {launches.verdict}")
        if use is not None and top:
            _print_device(use, top)
    if len(traces_read) > 1 and traces_read[0].kernels:
        at = knee(traces_read)
        print(
            f"compute-bound from {at.name} on" if at else "launch-bound in all of them"
        )
    return 0


def _print_device(use: "DeviceUse", top: int) -> None:
    """Print what operators take on host and device, the stretches between the two bounds, and the longest gaps."""
    print_table(
        ("operator", "calls", "host ms", "kernels", "device ms", "bound"),
        [
            (
                operator.name,
                f"{operator.calls:,}",
                f"{operator.host / 1e3:.2f}",
                f"{operator.kernels:,}",
                f"{operator.device / 1e3:.2f}",
                operator.verdict,
            )
            for operator in use.operators[:top]
        ],
    )
    print(
        f"{use.share(True):.0%} of the time compute-bound, {use.share(False):.0%} launch-bound, "
        f"in {len(use.stretches)} stretches"
    )
    for gap in use.gaps:
        print(
            f"nothing on the device for {gap.length:.1f} us at {gap.begin / 1e3:.3f} ms: the host is in {gap.host}"
        )
