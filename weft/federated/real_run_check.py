"""Proof that real clients and the virtual clock are one: a small real run, and its recorded arrivals once more.

A server and two clients run as processes of their own on this machine, with the policy and the settings of a recipe
and a small model of text in float64. The virtual clock then follows the events that the server has recorded.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.errors import UsageError, WeftError
from weft.federated.federation_events import read_events
from weft.federated.server_invitation import INVITATION_FILE
from weft.federated.trained_cohort import replayed_model, stored_model
from weft.recipe.federated_rules import OF_SIMULATION
from weft.recipe.toml import write_toml

if TYPE_CHECKING:
    from weft.recipe import Recipe

#: Clients of the real run, changes of its model, and local steps of a work.
CLIENTS, ROUNDS, STEPS = 2, 4, 3
#: Largest difference of a parameter, relative to the largest of its tensor, that rounding explains in float64.
LIMIT = 1e-10
#: Exit code of a process that was asked for what cannot be.
REQUEST = 2
#: Seconds that the real run may take.
LONGEST_S = 900.0
#: The same where masked sums take the place of sums, and how much of a difference is not counted there: masked updates
#: are multiples of 2^-40, which for an adapter that begins with zeros is no small part of what it has learned.
MASKED_LIMIT, MASKED_SLACK = 1e-8, CLIENTS * ROUNDS * 2.0**-40
#: Settings whose part in a real run the virtual clock does not repeat: noise, and what is sent back.
NOT_REPEATED = ("noise", "compress_back", "average")


class RealRunDifference(NamedTuple):
    """Result of comparing a real run with its replay.

    ``difference``: largest relative difference of a parameter. ``worst``: name of the tensor that has it. ``updates``:
    number of updates that arrived. ``changes``: number of changes of the model. ``limit``: largest difference that
    rounding explains.
    """

    difference: float
    worst: str
    updates: int
    changes: int

    limit: float = LIMIT

    @property
    def ok(self) -> bool:
        """Whether the difference is at most ``limit``, and thus explained by rounding."""
        return self.difference <= self.limit


def compare_real_run(
    recipe: Recipe, say: Callable[[str], object], adapter: dict[str, Any] | None = None
) -> RealRunDifference:
    """Train a small model with the federated policy of ``recipe`` in real processes, repeat that run on the virtual
    clock, and compare the two resulting models.

    ``say``: prints a line. ``adapter``: the recipe's section ``[adapter]``, with which the small model is trained;
    None: without an adapter. Raises :class:`UsageError` for settings that cannot be compared, and :class:`WeftError` if
    a process fails.
    """
    settings = _settings(recipe)
    with tempfile.TemporaryDirectory(prefix="weft-verify-") as name:
        folder = Path(name)
        server, run = folder / "server.toml", folder / "server"
        tree = _server_tree(folder, settings)
        server.write_text(write_toml(tree | ({"adapter": adapter} if adapter else {})))
        say(f"a server and {CLIENTS} clients run as processes of their own")
        names = [f"client{number}" for number in range(CLIENTS)]
        _run(folder, server, run, names)
        say("the virtual clock follows the recorded arrivals")
        from weft.recipe import load_recipe

        clients = {
            client: load_recipe(
                folder / client / "recipe.toml",
                [f"data.cache={folder}"],
                data=str(_texts(folder, client)),
            )
            for client in names
        }
        own = load_recipe(server)
        replayed = replayed_model(own, run, clients, folder / "replay")
        real = stored_model(own, run)
        updates = [event for event in read_events(run) if event.kind == "update"]
    masked = bool(settings.get("secure"))
    slack = MASKED_SLACK if masked else 0.0
    apart = {
        name: max(float((x - replayed[name]).abs().max()) - slack, 0.0)
        / float(x.abs().max() or 1.0)
        for name, x in real.items()
    }
    worst = max(apart, key=lambda name: apart[name])
    limit = MASKED_LIMIT if masked else LIMIT
    return RealRunDifference(apart[worst], worst, len(updates), ROUNDS, limit)


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of ``[federated]`` for the real run."""
    assert recipe.federated is not None
    fields = type(recipe.federated).model_fields
    for key in NOT_REPEATED:
        if getattr(recipe.federated, key) != fields[key].default:
            raise UsageError(
                f"the virtual clock does not repeat federated.{key}, so that there is nothing to compare; leave it out"
            )
    given = recipe.federated.model_dump(mode="json", exclude_unset=True)
    left_out = {*OF_SIMULATION, "listen", "join", "name", "seconds"}
    asked = {key: value for key, value in given.items() if key not in left_out}
    return {"steps": STEPS} | asked | {
        "listen": "127.0.0.1:0", "clients": CLIENTS, "rounds": ROUNDS, "patience": LONGEST_S / 3,
    }  # fmt: skip


def _server_tree(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "verify", "model": {"layers": 1, "embed": 16, "heads": 2},
        "train": {"batch": 2, "dtype": "float64", "threads": 1}, "checkpoint": {"every": ROUNDS},
        "optimizer": {"kind": "sgd", "lr": 0.02, "warmup": 0}, "validation": {"every": 0},
        "data": {"seq_len": 24, "cache": str(folder)}, "federated": settings,
    }  # fmt: skip


def _texts(folder: Path, client: str) -> Path:
    """Return the file with a client's texts, which follow from its name."""
    path, rng = folder / f"{client}.jsonl", random.Random(client)
    lines = ["".join(rng.choices("abcdefgh \n", k=rng.choice([5, 20, 60]))) for _ in range(30)]  # fmt: skip
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def _run(folder: Path, server: Path, run: Path, names: list[str]) -> None:
    """Run the server and its clients until all have ended well."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    deadline = time.monotonic() + LONGEST_S

    def start(name: str, *words: object) -> None:
        with (folder / f"{name}.log").open("wb") as log:
            processes[name] = subprocess.Popen(
                [sys.executable, "-m", "weft", *map(str, words)],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def look() -> bool:
        """Return whether all processes have ended well."""
        codes = {name: process.poll() for name, process in processes.items()}
        for name, code in codes.items():
            if code:
                said = (folder / f"{name}.log").read_text(errors="replace").strip()
                last = said.rpartition("\n")[2]
                if code == REQUEST:
                    raise UsageError(last.removeprefix("weft: error: "))
                raise WeftError(
                    f"the {name} of the real run has ended with exit code {code}: {last}"
                )
        waits = [name for name, code in codes.items() if code is None]
        if waits and time.monotonic() > deadline:
            raise WeftError(
                f"the real run takes more than {LONGEST_S:g} s; {', '.join(waits)} have not ended"
            )
        time.sleep(0.1)
        return not waits

    try:
        start("server", "train", server, "--out", run)
        while not (run / INVITATION_FILE).exists():
            look()
        for name in names:
            start(
                name, "client", "--join", run / INVITATION_FILE, "--data", _texts(folder, name), "--name", name,
                "--out", folder / name, "--set", f"data.cache={folder}",
            )  # fmt: skip
        while not look():
            pass
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
