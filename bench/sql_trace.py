"""Write a trace of agents that turn questions into SQL: each is several requests, one after the other, by a deadline.

    python bench/sql_trace.py [--jobs 300] [--seed 0] [--out bench/traces/text2sql.jsonl]

An agent (in the manner of CHESS, 2405.16755, and HexGen-Text2SQL, 2505.05286) links a question to the schema of its
database, writes several candidates at once, corrects those that fail, one loop after the other, and selects a
candidate. All prompts for a database begin with its schema. Lengths, loops and databases are drawn; there is no text.

Each line is a job: ``id``; ``time``, its arrival in units of the mean pause between jobs, which come in bursts;
``database``, its number; ``slack``, the time that it has as a multiple of what it takes alone; and ``stages``, one
after the other. A stage has a ``stage`` label, the labels ``remaining`` that its client expects to follow, and
``calls``, which are sent together: of each the tokens of the schema, of the rest of the prompt, and of the answer.
"""

import json
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from weft.serve.load_requests import arrival_pauses

STAGES = ("linking", "candidates", "correction", "selection")
DATABASES = 24
#: Of arrivals: 1 would be a Poisson process.
BURSTINESS = 0.3
TRACE = Path(__file__).parent / "traces" / "text2sql.jsonl"


def jobs(count: int, seed: int) -> list[dict[str, Any]]:
    """Return ``count`` jobs as the lines of a trace have them."""
    draw = Random(seed)
    times = accumulate(arrival_pauses(count, 1.0, BURSTINESS, seed))
    schemas = [round(draw.lognormvariate(6.9, 0.5)) for _ in range(DATABASES)]
    trace = []
    for number, time in enumerate(times):
        database = min(int(draw.expovariate(0.25)), DATABASES - 1)
        schema, hard = schemas[database], draw.random()
        stages = [_stage(0, [_call(draw, schema, 120, 40)]) for _ in range(1 + (hard > 0.5))]  # fmt: skip
        written = [draw.lognormvariate(4.4, 0.5) * (1 + hard) for _ in range(draw.choice([2, 3, 3, 5]))]  # fmt: skip
        stages.append(_stage(1, [_call(draw, schema, 200, sql) for sql in written]))
        failing = [sql for sql in written if draw.random() < 0.25 + 0.3 * hard]
        while failing and len(stages) < 6:
            stages.append(_stage(2, [_call(draw, schema, 320 + sql, sql) for sql in failing]))  # fmt: skip
            failing = [sql for sql in failing if draw.random() < 0.4]
        stages.append(_stage(3, [_call(draw, schema // 4, 100 + sum(written), 24)]))
        trace.append({
            "id": f"q{number}", "time": round(time, 4), "database": database,
            "slack": round(draw.uniform(1.2, 3.0), 2), "stages": stages,
        })  # fmt: skip
    return trace


def _stage(number: int, calls: list[list[int]]) -> dict[str, Any]:
    return {"stage": STAGES[number], "remaining": STAGES[number + 1 :], "calls": calls}


def _call(draw: Random, schema: int, prompt: float, tokens: float) -> list[int]:
    """The tokens of the schema, of the rest of the prompt, and of the answer."""
    prompt, tokens = (x * draw.lognormvariate(0, 0.3) for x in (prompt, tokens))
    return [schema, max(8, round(prompt)), max(4, round(tokens))]


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the jobs of a trace."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(
    count: Annotated[int, typer.Option("--jobs", min=1)] = 300,
    seed: int = 0,
    out: Path = TRACE,
) -> None:
    """Write the trace."""
    out.parent.mkdir(exist_ok=True)
    lines = [json.dumps(job, separators=(",", ":")) + "\n" for job in jobs(count, seed)]
    out.write_text("".join(lines))
    calls = [c for line in lines for s in json.loads(line)["stages"] for c in s["calls"]]  # fmt: skip
    print(f"{out}: {count} jobs, {len(calls)} requests, {sum(c[-1] for c in calls):,} tokens")  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
