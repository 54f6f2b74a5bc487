"""Bytes and losses of a federated fine-tuning of SmolLM2-135M's adapters over four clients' conversations.

    python bench/federated_adapters.py FOLDER [--quick] [--out bench/results/federated_adapters.json]

FOLDER: the model as a Hugging Face folder. A server and four clients are processes of this machine; each client has
conversations of one kind of its own, and the server judges the model on held-out ones of all kinds. Clients train
low-rank adapters and send their differences by `topk:0.1`, with what is left out fed back; changes come back by
`int8`. The bytes are those that the sockets have carried, and are compared with those that as many works would take
with the whole weights in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from weft.federated.federated_facts import learning_shapes
from weft.federated.federation_events import read_events
from weft.observe.run_metrics import read_metrics
from weft.recipe import load_recipe
from weft.recipe.toml import write_toml
from weft.shapes.parameters import parameter_count
from weft.train.setup import model_shape

CLIENTS = 4
#: Kinds of conversations: a question with a hole, and what is answered.
KINDS = (
    ("What colour is {}?", "The colour of {} is blue, as always here."),
    ("Spell {} backwards.", "Backwards, {0} reads {1}."),
    ("Where do I find {}?", "You find {} on the third shelf, behind the door."),
    ("Count the letters of {}.", "{0} has {2} letters."),
)
WORDS = (  # noqa: SIM905
    """apple river stone window garden paper lantern bridge cotton silver monkey pencil forest candle rocket button
    pillow violin anchor basket"""
).split()


def conversations(kind: int, words: list[str]) -> str:
    question, answer = KINDS[kind]
    lines = []
    for word in words:
        turns = [
            {"role": "user", "content": question.format(word)},
            {
                "role": "assistant",
                "content": answer.format(word, word[::-1], len(word)),
            },
        ]
        lines.append(json.dumps({"messages": turns}))
    return "\n".join(lines) + "\n"


def write_inputs(folder: Path, model: str, rounds: int, steps: int) -> None:
    """Write the clients' conversations, the server's held-out ones, and the server's recipe."""
    for kind in range(CLIENTS):
        (folder / f"client{kind}.jsonl").write_text(conversations(kind, WORDS[:16]))
    held_out = "".join(conversations(kind, WORDS[16:]) for kind in range(CLIENTS))
    (folder / "held-out.jsonl").write_text(held_out)
    recipe = {
        "name": "adapters", "model": {"from": model}, "adapter": {"rank": 8},
        "data": {
            "kind": "chat", "path": str(folder / "held-out.jsonl"), "validation": 0.9, "seq_len": 64,
            "cache": str(folder),
        },
        "train": {"batch": 2, "threads": 1},
        "optimizer": {"lr": 1e-3, "warmup": 0, "schedule": "constant"},
        "checkpoint": {"every": 0}, "validation": {"every": 1},
        "federated": {
            "listen": "127.0.0.1:0", "steps": steps, "rounds": rounds, "clients": CLIENTS, "patience": 1800.0,
            "grace": 60.0, "compress": "topk:0.1", "compress_back": "int8", "largest": 0.0,
        },
    }  # fmt: skip
    (folder / "server.toml").write_text(write_toml(recipe))


def run(folder: Path, stack: ExitStack, limit: float) -> None:
    """Run a server and its clients until all have ended."""
    processes = {}

    def start(name: str, *words: object) -> None:
        with (folder / f"{name}.log").open("wb") as said:
            line = [sys.executable, "-m", "weft", *map(str, words)]
            processes[name] = subprocess.Popen(
                line, stdout=said, stderr=subprocess.STDOUT
            )
        stack.callback(
            lambda: processes[name].poll() is None and processes[name].kill()
        )

    start("server", "train", folder / "server.toml", "--out", folder / "server")
    deadline = time.monotonic() + limit
    while not (folder / "server/invitation").exists():
        assert processes["server"].poll() is None, (folder / "server.log").read_text()
        time.sleep(0.2)
    for kind in range(CLIENTS):
        start(
            f"client{kind}", "client", "--join", folder / "server/invitation", "--data", folder / f"client{kind}.jsonl",
            "--name", f"client{kind}", "--out", folder / f"client{kind}", "--set", f"data.cache={folder}",
            "--set", "checkpoint.every=0",
        )  # fmt: skip
    for name, process in processes.items():
        code = process.wait(max(1.0, deadline - time.monotonic()))
        assert code == 0, (folder / f"{name}.log").read_text()[-3000:]


def figures(folder: Path) -> dict[str, object]:
    """Return what the server has recorded, beside what whole weights would have taken."""
    recipe = load_recipe(folder / "server.toml")
    shape = model_shape(recipe)
    whole = 4 * parameter_count(shape.model_copy(update={"adapter": None}), shape.vocab)
    adapter = 4 * sum(_count(size) for size in learning_shapes(recipe, shape).values())
    works = sum(event.kind == "update" for event in read_events(folder / "server"))
    metrics = read_metrics(folder / "server")
    last = metrics["federated"][-1]
    losses = [record["loss"] for record in metrics["validation"]]
    return {
        "clients": CLIENTS, "works": works, "whole_bytes_per_way": whole, "adapter_bytes_per_way": adapter,
        "down": last["down"], "up": last["up"], "up_per_work": last["up"] / works, "bytes": last["bytes"],
        "times_fewer_than_whole": 2 * works * whole / last["bytes"],
        "times_fewer_up": works * whole / last["up"], "first_loss": losses[0], "last_loss": losses[-1],
    }  # fmt: skip


def _count(size: tuple[int, ...]) -> int:
    count = 1
    for length in size:
        count *= length
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", metavar="FOLDER")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--limit", type=float, default=3600.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument(
        "--out", type=Path, default=Path("bench/results/federated_adapters.json")
    )
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rounds, steps = (2, 2) if given.quick else (6, 8)
    with ExitStack() as stack:
        folder = given.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory())
        )
        folder.mkdir(parents=True, exist_ok=True)
        write_inputs(folder, str(Path(given.model).resolve()), rounds, steps)
        began = time.monotonic()
        run(folder, stack, given.limit)
        result = {
            "rounds": rounds,
            "steps": steps,
            "seconds": round(time.monotonic() - began, 1),
            **figures(folder),
        }
    print(json.dumps(result, indent=1))
    assert result["times_fewer_than_whole"] >= 50, result
    if not given.quick:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
