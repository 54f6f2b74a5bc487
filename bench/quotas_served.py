"""`weft serve --phases split --quota` on a load that drifts: quotas that controllers choose beside fixed ones.

    python bench/quotas_served.py [--rounds 2] [--minutes 8]

Nothing is emulated: a random model of SmolLM2's shape with fewer layers, two processes that share the machine's cores,
clients over HTTP. The load alternates between long prompts with short answers and many short prompts with longer ones.
Its rates and the limits are set by what one process can do here at the beginning. All ways play the same load in turn,
in every round another one; what has not ended in one and a half times the time of its turn counts as failed. Results
are written after every turn. Clients need a part of the cores too, as much with every way.
"""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from quotas import FIXED, Limits, Stage, drifting_load, figures, mean_of, show, verdict
from service_faults import SHAPE, TEMPLATE, Processes, free_port, metrics_text, until
from service_placements import play
from step import machine

from weft.data.tokenizer import load_tokenizer
from weft.layout.mesh import Mesh
from weft.models.hugging_face import export
from weft.parallel.build import parallelize, resident_state
from weft.recipe import Train
from weft.serve.cluster_simulation import ClusterRequest

RESULTS = Path(__file__).parent / "results" / "quotas_served.json"
#: Ways that are compared: policies of one process, and quotas of two.
ONE, QUOTAS = ("chunked:64",), ("0.3", "0.5", "0.7", "nexus")
#: Seconds that a turn takes beside its load.
BETWEEN_S = 25.0


class Capacity(NamedTuple):
    """What one process can do: seconds of a prompt's ``token`` in full steps, and of a ``step`` of eight texts."""

    token: float
    step: float


def export_small(folder: Path) -> None:
    """Write a random model of SmolLM2-135M's shape, with fewer layers, to ``folder``/tiny."""
    shape = SHAPE.model_copy(
        update={"layers": 4, "embed": 576, "heads": 9, "kv_heads": 3, "ffn": 1536}
    )
    model = parallelize(shape, Mesh.single(), Train(seed=1))[0]
    files = replace(load_tokenizer("bytes"), chat_template=TEMPLATE).files()
    weights = {p.name: p.local for p in resident_state(model, model.mesh).held}
    export(weights, shape, folder / "tiny", files=files)


@asynccontextmanager
async def server(folder: Path, word: str) -> AsyncIterator[int]:
    """Run ``weft serve``; gives its port. ``word``: a policy of one process, or a quota of two."""
    way = (
        (f"--policy={word}",) if word in ONE else ("--phases=split", f"--quota={word}")
    )
    processes, port = Processes(folder), free_port()
    processes.start(
        "service", "serve", "--checkpoint", str(folder / "tiny"), "--port", str(port), "--name", "tiny",
        "--requests=64", "--budget=256", "--cache=32768", "--drain=1", *way,
    )  # fmt: skip

    async def answers() -> bool:
        return bool(await metrics_text(port))

    try:
        if not await until(answers, 180):
            raise SystemExit(
                f"{word}: it does not answer; {folder}/service.log says why"
            )
        warm = [ClusterRequest(0.2 * i, [97 + i] * 300, 6) for i in range(4)]
        await play(port, warm)
        yield port
    finally:
        if wrong := processes.close():
            print(word, wrong, flush=True)


async def capacity(folder: Path) -> Capacity:
    """Measure what one process can do, through HTTP."""
    async with server(folder, ONE[0]) as port:
        prompts = [ClusterRequest(0.0, [97 + i] * 250, 1) for i in range(8)]
        token = max(each.end for each in await play(port, prompts)) / (8 * 250)
        texts = [ClusterRequest(0.0, [105 + i] * 30, 40) for i in range(8)]
        outcomes = await play(port, texts)
        step = max(o.times[-1] - o.times[0] for o in outcomes) / 39
    return Capacity(token, step)


class Comparison:
    """The ways in turns. ``turn``: seconds of a load; ``able``: what one process can do."""

    def __init__(self, out: Path, rounds: int, turn: float, able: Capacity) -> None:
        self.out, self.rounds, self.turn = out, rounds, turn
        # at two fifths of what one process can do
        long, short = (
            0.4 / (prompt * able.token + answer * able.step / texts)
            for prompt, answer, texts in ((300, 8, 4), (30, 30, 6))
        )
        self.stages = (
            Stage(300, 8, long, turn / 4),
            Stage(30, 30, short, turn / 4),
        ) * 2
        self.limits = Limits(6 * 300 * able.token, 3 * able.step)
        own = f"semi-pd:{self.limits.ttft:.3f},{self.limits.tpot:.4f}"
        self.words = {word: word for word in (*ONE, *QUOTAS)} | {"semi-pd": own}
        self.rows: dict[str, list[dict[str, float]]] = {name: [] for name in self.words}
        self.record: dict[str, Any] = {
            "machine": machine(),
            "seconds of a prompt token": able.token,
            "seconds of a step of 8 texts": able.step,
            "limits": self.limits._asdict(),
            "stages": [stage._asdict() for stage in self.stages[:2]],
            "rounds": rounds,
            "load of the machine": [],
        }

    async def run(self, folder: Path) -> None:
        for number in range(self.rounds):
            load = drifting_load(self.stages, 10 + number, 256)
            names = [*self.words]
            for name in names[number % len(names) :] + names[: number % len(names)]:
                async with server(folder, self.words[name]) as port:
                    outcomes = await play(port, load, 1.5 * self.turn)
                row = figures(outcomes, self.limits)
                row["failed"] = sum(bool(each.error) for each in outcomes)
                self.rows[name].append(row)
                self.record["load of the machine"].append(os.getloadavg()[0])
                show(f"round {number}, {len(load)} requests", {name: row})
                self._write()

    def _write(self) -> None:
        means = {name: mean_of(rows) for name, rows in self.rows.items() if rows}
        self.record |= {"every round": self.rows, "ways": means}
        if means.keys() == self.rows.keys():
            self.record["verdict"] = verdict(means)
        self.out.write_text(json.dumps(self.record, indent=1) + "\n")


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 2,
    minutes: Annotated[float, typer.Option(min=1)] = 8.0,
    out: Path = RESULTS,
) -> None:
    """Compare all ways in about so many minutes, and write the figures."""
    assert {*QUOTAS} - {"nexus"} <= {*FIXED}
    begun = time.monotonic()

    async def run(folder: Path) -> None:
        able = await capacity(folder)
        print(
            f"{able.token:.5f} s per prompt token, {able.step:.4f} s per step",
            flush=True,
        )
        turns = rounds * (len(ONE) + len(QUOTAS) + 1)
        turn = max(12.0, (60 * minutes - time.monotonic() + begun) / turns - BETWEEN_S)
        await Comparison(out, rounds, turn, able).run(folder)

    with tempfile.TemporaryDirectory() as name:
        export_small(Path(name))
        asyncio.run(run(Path(name)))


if __name__ == "__main__":
    typer.run(main)
