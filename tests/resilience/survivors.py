"""Runs of several ranks for tests of what happens when ranks are lost: light processes, started as a launcher does."""

from __future__ import annotations

import gc
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.started import PRELOAD
from weft.api import be_rank
from weft.models.transformer import Transformer
from weft.observe.run_metrics import FILE, Record, read_metrics
from weft.prove.pool import fork_server
from weft.recipe import Recipe
from weft.resilience.island_party import IslandParty
from weft.resilience.run import join_run
from weft.run.failure import report_failure
from weft.run.launch import rank_environment
from weft.train import step

#: Seconds after which a run counts as hung.
HUNG = 240


def _be(
    rank: int, world: int, port: int, recipe: Recipe, out: str, joins: bool, row_s: float, gate: int | None,
    layer_s: float = 0.0, ahead_s: float = 0.0,
) -> None:  # fmt: skip
    gc.freeze()  # what the server has imported need not be looked at again
    os.environ |= rank_environment(rank, world, 1)
    os.environ |= {
        "MASTER_PORT": str(port),
        "TORCHELASTIC_ERROR_FILE": f"{out}.{rank}.json",
    }
    _pass_as_told(
        row_s, None if joins else gate, Path(f"{out}.gate"), Path(f"{out}.{rank}.rows")
    )
    if layer_s:
        _layers_take(layer_s)
    if ahead_s:
        _layers_travel(ahead_s, Path(f"{out}.{rank}.ahead"))
    with open(f"{out}.{rank}.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        if joins:
            folder = Path(out.rstrip("+"))
            _note_when_let_in(Path(f"{out}.{rank}.in"))
            concludes = join_run(folder).concludes
        else:
            concludes = False

            def conclude(*given: Any) -> None:
                nonlocal concludes
                concludes = True

            be_rank(recipe, Path(out), None, conclude)
        if concludes:
            Path(f"{out}.{rank}.concludes").touch()
    except BaseException as error:
        report_failure(error)
    os._exit(0)


def _pass_as_told(row_s: float, gate: int | None, opened: Path, rows: Path) -> None:
    """From now on a forward pass of this process sleeps so long for every row, as if it computed on its own cores.

    ``gate``: after so many passes this process waits until somebody has ``opened`` the gate. ``rows`` gets a line for
    each pass: how many rows it had.
    """
    plain, passes = step.pass_loss, itertools.count(1)

    def told(model: Any, batch: Any, *rest: Any) -> Any:
        time.sleep(row_s * batch.tokens.shape[0])
        with rows.open("a") as lines:
            lines.write(f"{batch.tokens.shape[0]}\n")
        number = next(passes)
        while gate is not None and number > gate and not opened.exists():
            time.sleep(0.01)
        return plain(model, batch, *rest)

    step.pass_loss = told


def _layers_take(layer_s: float) -> None:
    """From now on every layer of this process takes so long in forward and as long in backward.

    What it computes is part of that time, so that a layer that waits for its core takes no longer, unless for longer
    than that.
    """
    plain = Transformer.run_block

    def wait_from(begun: float) -> None:
        time.sleep(max(0.0, begun + layer_s - time.monotonic()))

    def run(model: Any, i: int, x: Any, *rest: Any) -> Any:
        begun = time.monotonic()
        y = plain(model, i, x, *rest)
        wait_from(begun)
        if not y.requires_grad:
            return y
        backward = time.monotonic()

        def begin(grad: torch.Tensor) -> None:
            nonlocal backward
            backward = time.monotonic()
            if not x.requires_grad:
                time.sleep(layer_s)

        y.register_hook(begin)
        if x.requires_grad:
            x.register_hook(lambda grad: wait_from(backward))
        return y

    Transformer.run_block = run  # type: ignore[method-assign]


def _layers_travel(ahead_s: float, note: Path) -> None:
    """From now on every message about a layer that moves to another rank takes so long. ``note`` appears with the
    first.
    """
    from weft.resilience.layers_ahead import LayerMessage, LayersAhead

    plain = LayersAhead._send

    def send(ahead: LayersAhead, message: LayerMessage) -> None:
        note.touch()
        time.sleep(ahead_s)
        plain(ahead, message)

    LayersAhead._send = send  # type: ignore[method-assign]


def _note_when_let_in(note: Path) -> None:
    """Make the file when this process has been let in to islands that went on without its own."""
    plain = IslandParty.come

    def come(party: IslandParty) -> None:
        plain(party)
        note.touch()

    IslandParty.come = come


class Ranks:
    """The processes of one run, by the rank with which they were started.

    ``row_s``: how long each of these sleeps for every row, the last one's is also that of all that come later.
    ``gate``: those that begin the run go no further than so many passes before ``open`` is called.
    """

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        row_s: Sequence[float] = (0.0,),
        gate: int | None = None,
        layer_s: Sequence[float] = (0.0,),
        ahead_s: float = 0.0,
    ) -> None:
        # Forking from a server that has imported PyTorch starts a rank in milliseconds.
        context = fork_server((*PRELOAD, __name__))
        self._layer_s, self._ahead_s = layer_s, ahead_s
        self.recipe, self.out, self._context, self._row_s, self._gate = (
            recipe,
            out,
            context,
            row_s,
            gate,
        )
        self.processes: list[Any] = []
        self.start(recipe.layout.world, joins=False)

    def start(self, count: int, joins: bool = True, folder: Path | None = None) -> None:
        """Start so many ranks; if the run has begun, they are to join it: that in ``folder``, if it is another."""
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        for rank in range(count):
            row_s = self._row_s[min(len(self.processes), len(self._row_s) - 1)]
            layer_s = self._layer_s[min(len(self.processes), len(self._layer_s) - 1)]
            where = f"{folder or self.out}{'+' * joins}"
            given = (
                rank,
                count,
                self._store.port,
                self.recipe,
                where,
                joins,
                row_s,
                self._gate,
                layer_s,
                self._ahead_s,
            )
            self.processes.append(
                self._context.Process(target=_be, args=given, daemon=True)
            )
            self.processes[-1].start()

    def open(self) -> None:
        Path(f"{self.out}.gate").touch()

    def signal(self, rank: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid, number)

    def records(self, kind: str = "train") -> list[Record]:
        with suppress(FileNotFoundError):
            # the last may not be whole
            lines = (self.out / FILE).read_text().rpartition("\n")[0].splitlines()
            return [
                record for line in lines if (record := json.loads(line))["kind"] == kind
            ]
        return []

    def rows(self, rank: int) -> list[int]:
        """The rows of each forward pass of a rank so far."""
        return [
            int(line)
            for line in Path(f"{self.out}.{rank}.rows").read_text().splitlines()
        ]

    def wait_for(self, done: Callable[[], bool], seconds: float = HUNG) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, f"hung:\n{self.words()}"
            assert any(process.is_alive() for process in self.processes), (
                f"all have ended:\n{self.words()}"
            )
            time.sleep(0.01)

    def step(self, step: int) -> None:
        """Wait until this step is recorded."""
        self.wait_for(lambda: any(record["step"] >= step for record in self.records()))

    def end(self, lost: Sequence[int] = ()) -> None:
        """Wait until all but those that were ``lost`` have ended, and have ended well."""
        for rank, process in enumerate(self.processes):
            if rank not in lost:
                process.join(HUNG)
                assert process.exitcode == 0, (
                    f"rank {rank} ended with {process.exitcode}:\n{self.words()}"
                )

    def words(self) -> str:
        logs = sorted(self.out.parent.glob(f"{self.out.name}*.[lj]*"))
        return "\n".join(
            f"{log.name}: {log.read_text()[-3000:]}" for log in logs if log.exists()
        )

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def ranks(
    recipe: Recipe, out: Path, row_s: Sequence[float] = (0.0,), gate: int | None = None,
    layer_s: Sequence[float] = (0.0,), ahead_s: float = 0.0,
) -> Iterator[Ranks]:  # fmt: skip
    """The ranks of a run in the folder ``out``; none is left at the end. ``layer_s``: seconds that a layer takes on
    each, forward and backward. ``ahead_s``: seconds that each message about a layer that moves takes besides.
    """
    started = Ranks(recipe, out, row_s, gate, layer_s, ahead_s)
    try:
        yield started
    finally:
        started.kill()


def losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(run)["train"]}


def recorded_once(run: Path) -> list[int]:
    """The steps of all ``train`` records, as they stand in the file."""
    lines = (run / FILE).read_text().splitlines()
    return [
        record["step"]
        for line in lines
        if (record := json.loads(line))["kind"] == "train"
    ]
