"""Two peers behind two gateways that translate addresses: network namespaces, and a relay that both can reach."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hosts import _run, _space, unavailable

from tests.cases import write_corpus
from tests.conftest import Command
from weft.observe.run_metrics import read_metrics
from weft.peers.invitation import invite

pytest.importorskip("iroh")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why := unavailable()), reason=why),
    pytest.mark.skipif(
        not shutil.which("iptables"), reason="translation takes the command iptables"
    ),
]

ROOT = Path(__file__).parents[2]
RELAY = "203.0.113.1"
#: A relay that looks at what passes, and says at its end how much that was and whether it could read a word of it.
CURIOUS = """
import asyncio, signal, sys
from weft.peers.invitation import read_ticket
from weft.peers.relay import Relay

class Curious(Relay):
    words = 0
    async def _forward(self, sender, frame):
        self.words += frame.count(b"a word that only members read")
        await super()._forward(sender, frame)

async def run():
    relay = Curious(read_ticket(sys.argv[1]), say=lambda text: print(text, flush=True))
    task = asyncio.create_task(relay.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await asyncio.gather(task, return_exceptions=True)
    print("words", relay.words, "bytes", relay.relayed, flush=True)

asyncio.run(run())
"""


@contextmanager
def translated(*how: str) -> Iterator[dict[str, str]]:
    """Namespaces: ``relay`` in the wide net; ``a`` and ``b`` each behind a gateway, with the same private address.

    ``how``: words for the rule of translation. A gateway lets nothing in that was not asked for.
    """
    begin = f"c-{os.getpid()}"
    with ExitStack() as stack:
        names = {n: f"{begin}-{n}" for n in ("relay", "gate-a", "gate-b", "a", "b")}
        for name in names.values():
            _space(name, stack)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        wide = names["relay"]
        _run("ip", "-n", wide, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", wide, "addr", "add", f"{RELAY}/24", "dev", "bridge")
        _run("ip", "-n", wide, "link", "set", "bridge", "up")
        for number, host in enumerate("ab"):
            gate, host = names[f"gate-{host}"], names[host]
            _wire(gate, "wan", f"203.0.113.{number + 2}/24", wide, f"port{number}")
            _run(
                "ip",
                "-n",
                wide,
                "link",
                "set",
                f"port{number}",
                "master",
                "bridge",
                "up",
            )
            _wire(gate, "lan", "192.168.7.1/24", host, "eth0")
            _run("ip", "-n", host, "addr", "add", "192.168.7.2/24", "dev", "eth0")
            _run("ip", "-n", host, "link", "set", "eth0", "up")
            _run("ip", "-n", host, "route", "add", "default", "via", "192.168.7.1")
            inside = ("ip", "netns", "exec", gate)
            _run(*inside, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            _run(
                *inside,
                "iptables",
                "-t",
                "nat",
                "-A",
                "POSTROUTING",
                "-o",
                "wan",
                "-j",
                "MASQUERADE",
                *how,
            )
            for chain in ("FORWARD", "INPUT"):
                _run(
                    *inside,
                    "iptables",
                    "-A",
                    chain,
                    "-i",
                    "wan",
                    "-m",
                    "state",
                    "--state",
                    "NEW",
                    "-j",
                    "DROP",
                )
        yield names


def _wire(gate: str, device: str, address: str, other: str, end: str) -> None:
    _run(
        "ip",
        "link",
        "add",
        device,
        "netns",
        gate,
        "type",
        "veth",
        "peer",
        "name",
        end,
        "netns",
        other,
    )
    _run("ip", "-n", gate, "addr", "add", address, "dev", device)
    _run("ip", "-n", gate, "link", "set", device, "up")


class Processes:
    """Processes in namespaces, each with a file of what it says; all ended at last."""

    def __init__(
        self, folder: Path, spaces: dict[str, str], variables: dict[str, str]
    ) -> None:
        self.folder, self.spaces, self.variables = folder, spaces, variables
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, space: str, *words: str, said: str) -> subprocess.Popen[bytes]:
        line = ["ip", "netns", "exec", self.spaces[space], sys.executable, *words]
        with (self.folder / said).open("wb") as out:
            process = subprocess.Popen(
                line,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | self.variables,
            )
        self.started.append(process)
        return process

    def peer(self, space: str, *words: str) -> subprocess.CompletedProcess[str]:
        line = [
            "ip",
            "netns",
            "exec",
            self.spaces[space],
            sys.executable,
            "-m",
            "weft",
            "peer",
            *words,
        ]
        env = os.environ | self.variables
        return subprocess.run(
            line, capture_output=True, text=True, env=env, timeout=240
        )

    def wait_for(self, said: str, text: str, limit: float = 240) -> None:
        until = time.monotonic() + limit
        while text not in (found := (self.folder / said).read_text()):
            assert time.monotonic() < until, (
                f"{said} has not said {text!r} but: {found}"
            )
            time.sleep(0.2)

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.terminate()
        for process in self.started:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(60)


@contextmanager
def circle(folder: Path, *how: str) -> Iterator[Processes]:
    """A relay and the variables of its circle, around two hosts that are translated."""
    ticket, invitation = invite(f"{RELAY}:3340")
    with translated(*how) as spaces:
        processes = Processes(folder, spaces, {"WEFT_INVITATION": str(invitation)})
        try:
            processes.start("relay", "-c", CURIOUS, str(ticket), said="relay")
            processes.wait_for("relay", "relay at")
            yield processes
        finally:
            processes.end()


@pytest.mark.soak
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("how", "direct"), [((), True), (("--random-fully",), False)])
def test_translated_peers_share_directly_or_over_a_relay_that_cannot_read(
    tmp_path: Path, how: tuple[str, ...], direct: bool
) -> None:
    shared = tmp_path / "run"
    shared.mkdir()
    (shared / "book").write_bytes(b"a word that only members read " * 100_000)
    with circle(tmp_path, *how) as at:
        at.start(
            "a",
            "-m",
            "weft",
            "peer",
            "join",
            "--name",
            "giver",
            "--share",
            str(shared),
            said="giver",
        )
        at.start("b", "-m", "weft", "peer", "join", "--name", "taker", said="taker")
        at.wait_for("taker", "giver is here")
        at.wait_for("giver", "taker is here")
        if direct:  # if not at once, then soon
            at.wait_for("taker", "direct, 203.0.113.2:")

        got = at.peer("b", "get", "run", "--to", str(tmp_path / "out"))
        assert got.returncode == 0, got
        assert (tmp_path / "out/run/book").read_bytes() == (
            shared / "book"
        ).read_bytes()
        status = json.loads(at.peer("b", "status", "--json").stdout)
        assert {f["path"] for f in status["files"]} == {"run/book"}

        for line in (
            str(invite(f"{RELAY}:3340")[1]),
            at.variables["WEFT_INVITATION"].replace("//", "//0", 1)[:-1],
        ):
            # a third, with another invitation or half a one
            refused = at.peer("relay", "status", "-i", line)
            assert (
                refused.returncode in (1, 2)
                and "book" not in refused.stdout + refused.stderr
            ), refused
            assert refused.stderr.strip().count("\n") <= 1, refused
        said = (tmp_path / "taker").read_text()
        assert ("direct, 203.0.113.2:" in said) == direct, said
    words, passed = (tmp_path / "relay").read_text().split("words ")[1].split(" bytes ")
    assert words == "0" and (direct or int(passed) > 3_000_000), (
        "the relay has carried the file, and read nothing"
    )


@pytest.mark.soak
def test_islands_behind_translation_train_through_the_relay(
    tmp_path: Path, command: Command
) -> None:
    """One island each, and no other way between them than streams over the relay: the same run as in one place."""
    corpus = write_corpus(tmp_path)
    small = ["model.layers=1", "model.embed=32", "data.seq_len=32", "train.batch=4", "train.steps=6",
             "train.dtype=float64", "validation.every=0", "checkpoint.every=6", "observe.split_every=0",
             f'data.sources=[{{kind="jsonl", path="{corpus}"}}]', f"data.cache={tmp_path}", "data.tokenizer=bytes",
             ]  # fmt: skip
    words = [
        "-m",
        "weft",
        "train",
        str(ROOT / "recipes/quickstart.toml"),
        *(w for s in small for w in ("--set", s)),
    ]
    code, _, err = command(*words[2:], "--layout", "dp=1", "--out", tmp_path / "one")
    assert code == 0, err

    ranks = {"MASTER_ADDR": "peer://home", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
             "LOCAL_WORLD_SIZE": "1"}  # fmt: skip
    layout = ["--layout", "island=2", "--set", "sync.every=1"]
    with circle(tmp_path, "--random-fully") as at:
        at.start("a", "-m", "weft", "peer", "join", "--name", "watcher", said="watcher")
        runs, ways = [], ("a", "b")
        for rank, name in enumerate(ways):
            at.variables |= ranks | {"RANK": str(rank)}
            out = ["--out", str(tmp_path / "two")]
            runs.append(at.start(name, *words, *layout, *out, said=f"train-{name}"))
        for run, name in zip(runs, ways, strict=True):
            assert run.wait(400) == 0, (tmp_path / f"train-{name}").read_text()
        here = [
            line
            for line in (tmp_path / "watcher").read_text().splitlines()
            if "home-1 is here" in line
        ]
        assert here and "direct" not in here[0]
    alone, apart = (read_metrics(tmp_path / run)["train"] for run in ("one", "two"))
    assert len(alone) == len(apart) == 6
    assert [r["loss"] for r in apart] == pytest.approx(
        [r["loss"] for r in alone], rel=1e-9
    )
    assert int((tmp_path / "relay").read_text().split(" bytes ")[1]) > 6 * 100_000, (
        "the agreements went over the relay"
    )
