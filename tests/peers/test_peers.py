"""Peers over the loopback device: who joins and who does not, blocks, streams, and what is said of who is gone."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from tests.cases import write_corpus
from tests.conftest import Command
from tests.measured import eventually
from tests.peers.conftest import RunningRelay
from weft.checkpoint.peer_storage import PeerStorage
from weft.checkpoint.storage import LocalStorage, MissingObject, StorageError
from weft.observe.run_metrics import read_metrics
from weft.peers import quic_peer as peers
from weft.peers import transport
from weft.peers.blocks import BLOCK
from weft.peers.download import download
from weft.peers.invitation import invite, read_invitation, read_ticket
from weft.peers.quic_peer import Peer
from weft.peers.transport import PeerError

pytest.importorskip("iroh")

ROOT = Path(__file__).parents[2]
Join = Callable[..., Peer]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of no, one and several blocks, and one that is still being written."""
    run = tmp_path / "run"
    (run / "data").mkdir(parents=True)
    (run / "empty").touch()
    (run / "small.json").write_text('{"a": 1}')
    (run / "data" / "0.bin").write_bytes(os.urandom(2 * BLOCK + 17))
    (run / "data" / ".0.bin.draft").write_bytes(b"not whole")
    return run


@pytest.mark.sampled(2)
def test_files_are_fetched_block_by_block_and_gone_on_with(
    joined: Join, folder: Path, tmp_path: Path
) -> None:
    joined("giver", folder)
    taker = joined("taker")
    taker.settle()
    assert {m.name for m in taker.members()} == {"giver"}
    # a way past the relay is looked for beside what is sent, however long that takes
    eventually(lambda: all(m.direct is not None for m in taker.members()))
    assert {p: s.size for p, s in taker.files().items()} == {
        "run/empty": 0, "run/small.json": 8, "run/data/0.bin": 2 * BLOCK + 17,
    }  # fmt: skip

    out = tmp_path / "out"
    # broken off in the second block
    broken = bytearray((folder / "data/0.bin").read_bytes()[: BLOCK + 5])
    broken[3] ^= 1  # and the first is damaged
    (out / "run/data").mkdir(parents=True)
    (out / "run/data/0.bin.part").write_bytes(bytes(broken[:BLOCK]) + b"?" * 5)
    assert download(taker, "run", out)["run/data/0.bin"] == 2 * BLOCK + 17
    assert sum(download(taker, "run", out).values()) == 0, (
        "what is there is not fetched again"
    )
    with (out / "run/data/0.bin").open("r+b") as damage:
        damage.seek(BLOCK + 1)
        damage.write(b"damage")
    assert sum(download(taker, "run/data", tmp_path / "out/run").values()) == BLOCK, (
        "only the block that is damaged"
    )
    for file in ("empty", "small.json", "data/0.bin"):
        assert (out / "run" / file).read_bytes() == (folder / file).read_bytes()
    assert not list(out.rglob("*.part"))
    with pytest.raises(PeerError, match="nobody shares elsewhere; there is: run"):
        download(taker, "elsewhere", out)


def test_who_comes_at_the_same_moment_is_waited_for(joined: Join) -> None:
    taker = joined("taker")
    with mock.patch.object(peers, "PAUSE", 20.0), ThreadPoolExecutor(1) as settling:
        settled = settling.submit(taker.settle)
        joined("giver")
        settled.result(60)
    assert {m.name for m in taker.members()} == {"giver"}


@pytest.mark.slow
def test_a_damaged_block_is_named_and_taken_from_another(
    joined: Join, folder: Path, tmp_path: Path
) -> None:
    good = tmp_path / "copy" / "run"
    good.mkdir(parents=True)
    (good / "0.bin").write_bytes((folder / "data/0.bin").read_bytes())
    liar, honest = joined("liar", folder), joined("honest", good)
    taker = joined("taker")
    eventually(
        lambda: (
            len(taker.holders(taker.files()["run/0.bin"].root)) == 2
            if "run/0.bin" in taker.files()
            else 0
        )
    )
    shared = taker.files()["run/0.bin"]
    index = taker.index("run/0.bin", shared)
    liar.shelf.read = lambda name: b"something else"  # type: ignore[method-assign]
    found = b"".join(taker.fetch(index, taker.having("run/0.bin", shared)))
    assert found == (good / "0.bin").read_bytes()
    assert any(
        s.startswith("liar has sent other bytes than its name says") for s in taker.said
    )  # type: ignore[attr-defined]
    honest.close()
    eventually(lambda: taker.holders(shared.root) == ["liar"])
    with pytest.raises(
        PeerError, match=r"is not to be had .*liar: has sent other bytes"
    ):
        taker.fetch(index, taker.having("run/0.bin", shared))
    liar.close()
    eventually(lambda: not taker.members())
    with pytest.raises(
        PeerError, match=r"run/0.bin is with .*liar.*, who cannot be reached now"
    ):
        taker.index("run/0.bin", shared)


@pytest.mark.sampled(2)
def test_who_has_no_invitation_neither_joins_nor_reads(
    relay: RunningRelay, joined: Join, folder: Path
) -> None:
    member = joined("member", folder)
    stranger = joined(
        "stranger", invitation=replace(relay.invitation, secret=bytes(32))
    )
    with pytest.raises(
        PeerError,
        match=f"the relay {relay.invitation.where}: the invitation is not one of this relay",
    ):
        stranger.settle()
    # One who knows the relay's token, as the relay does, and a member's key and address, and so can connect.
    (address,) = member.endpoint.addr().direct_addresses()[:1]
    stranger._loop.call_soon_threadsafe(stranger._dial, member.id, [address])
    eventually(lambda: any("cannot be reached" in text for text in stranger.said))  # type: ignore[attr-defined]
    assert not stranger.members() and not member.members() and not stranger.files()
    assert "not invited" in " ".join(stranger.said)  # type: ignore[attr-defined]


def test_an_uninvited_member_is_not_believed(
    relay: RunningRelay, joined: Join, folder: Path
) -> None:
    """Whoever is dialled must prove that it is invited as well, before it is told anything."""
    impostor = joined(
        "impostor", invitation=replace(relay.invitation, secret=bytes(32))
    )
    member = joined("member", folder)
    (address,) = impostor.endpoint.addr().direct_addresses()[:1]
    member._loop.call_soon_threadsafe(member._dial, impostor.id, [address])
    eventually(lambda: any("cannot be reached" in text for text in member.said))  # type: ignore[attr-defined]
    assert not member.members() and "run" not in str(impostor.table.entries)


def test_streams_lead_to_what_is_exposed_and_nowhere_else(joined: Join) -> None:
    giver, taker = joined("giver"), joined("taker")
    with socket.create_server(("127.0.0.1", 0)) as server:
        giver.expose("echo", server.getsockname()[1])

        def echo() -> None:
            for _ in range(2):
                end, _ = server.accept()
                with end:
                    while data := end.recv(1 << 16):
                        end.sendall(data)

        def say(end: socket.socket, data: bytes) -> None:
            end.sendall(data)
            end.shutdown(socket.SHUT_WR)

        sent = os.urandom(3 << 20)
        threading.Thread(target=echo, daemon=True).start()
        port = taker.reach("giver", "echo")
        for end in (
            taker.connect("giver", "echo"),
            socket.create_connection(("127.0.0.1", port), 30),
        ):
            with end:
                end.settimeout(60)
                threading.Thread(target=say, args=(end, sent), daemon=True).start()
                assert b"".join(iter(lambda e=end: e.recv(1 << 16), b"")) == sent
    with pytest.raises(PeerError, match="giver has no 'ssh'"):
        taker.connect("giver", "ssh")
    with pytest.raises(PeerError, match="giver nothing answers as its 'echo'"):
        taker.connect("giver", "echo")
    with pytest.raises(PeerError, match="nobody-there is not there: giver is"):
        taker.connect("nobody-there", "echo", limit=0.2)


@pytest.mark.soak
@pytest.mark.slow
def test_without_the_relay_those_who_are_joined_go_on(
    joined: Join, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = RunningRelay()
    joined("giver", folder, invitation=alone.invitation)
    taker = joined("taker", invitation=alone.invitation)
    taker.settle()
    alone.stop()
    eventually(lambda: alone.invitation.where in taker.problem)
    assert download(taker, "run/small.json", folder.parent / "out") == {
        "run/small.json": 8
    }
    (folder / "new").write_text("shared without a relay")
    eventually(lambda: "run/new" in taker.files())
    monkeypatch.setattr(peers, "DIAL", 4.0)
    late = joined("late", invitation=alone.invitation)
    with pytest.raises(PeerError, match=f"the relay {alone.invitation.where}: "):
        late.settle()
    alone.start()  # as who runs it would
    eventually(lambda: {m.name for m in late.members()} == {"giver", "taker"})
    alone.stop()


@pytest.mark.slow
def test_a_frozen_peer_is_gone_within_the_limit(
    joined: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen, watcher = joined("frozen"), joined("watcher")
    watcher.settle()
    monkeypatch.setattr(transport, "LIMIT", 3.0)
    halt = threading.Event()
    frozen._loop.call_soon_threadsafe(halt.wait)
    try:
        eventually(lambda: not watcher.members())
        assert "frozen is gone: no answer in time" in watcher.said  # type: ignore[attr-defined]
    finally:
        halt.set()


@pytest.mark.sampled(2)
def test_peers_are_a_place_for_checkpoints(
    relay: RunningRelay, joined: Join, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_INVITATION", str(relay.invitation))
    joined("giver", folder)
    local, far = LocalStorage(folder), PeerStorage("run")
    assert far.list() == local.list() and far.folders() == local.folders() == ["data"]
    assert (
        (far / "data").list("0") == {"0.bin": 2 * BLOCK + 17}
        and far.holds("empty")
        and not far.holds("data")
    )
    assert all(far.read(name) == local.read(name) for name in local.list())
    buffers = [memoryview(bytearray(n)) for n in (5, 0, BLOCK + 1)]
    expected = [memoryview(bytearray(n)) for n in (5, 0, BLOCK + 1)]
    far.read_into("data/0.bin", BLOCK - 3, *buffers)
    local.read_into("data/0.bin", BLOCK - 3, *expected)
    assert buffers == expected
    assert abs(far.modified("empty") - far.modified()) < 60
    for fails in (
        lambda: far.read("none"),
        lambda: far.read_into("empty", 0, buffers[0]),
        lambda: far.modified("none"),
    ):
        with pytest.raises(MissingObject, match="cannot read peer://run/"):
            fails()
    for fails in (
        lambda: far.write("x", []),
        lambda: far.create("x", b""),
        lambda: far.delete(["x"]),
        far.clear,
    ):
        with pytest.raises(StorageError, match="peers only share"):
            fails()


@pytest.mark.slow
def test_a_run_goes_on_from_a_peer_as_from_a_folder(
    relay: RunningRelay,
    joined: Join,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = ["model.layers=1", "model.embed=32", "data.seq_len=32", "train.batch=4", "validation.every=0",
             "observe.split_every=0", f'data.sources=[{{kind="jsonl", path="{write_corpus(tmp_path)}"}}]',
             f"data.cache={tmp_path}", "data.tokenizer=bytes"]  # fmt: skip
    words = [
        "train",
        ROOT / "recipes/quickstart.toml",
        "--layout",
        "dp=1",
        *(w for s in small for w in ("--set", s)),
    ]
    assert command(*words, "--set", "train.steps=2", "--out", tmp_path / "home")[0] == 0
    joined("giver", tmp_path / "home")
    monkeypatch.setenv("WEFT_INVITATION", str(relay.invitation))
    # this process may have been a peer before
    eventually(lambda: PeerStorage("home").list())
    losses = []
    for place in ("peer://home", tmp_path / "home"):
        out = tmp_path / f"out-{len(losses)}"
        code, _, err = command(
            *words, "--set", "train.steps=4", "--resume", place, "--out", out
        )
        assert code == 0, err
        losses.append([(r["step"], r["loss"]) for r in read_metrics(out)["train"]])
    assert losses[0] == losses[1] and [step for step, _ in losses[0]] == [3, 4]
    code, _, err = command(
        *words, "--resume", "peer://elsewhere", "--out", tmp_path / "none"
    )
    assert (
        code == 1
        and "peer://elsewhere does not exist; give a run folder or a checkpoint" in err
    )
    code, _, err = command(
        *words, "--set", "checkpoint.to=peer://home", "--out", tmp_path / "none"
    )
    assert code != 0 and "peers only share; save to a folder" in err


LINE = "weft-peer://" + "0" * 64 + "@host:1/" + "1" * 64


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status"], "there is no invitation: give one, or set WEFT_INVITATION"),
        (
            ["status", "-i", LINE[:-3]],
            "this is not an invitation: it begins with weft-peer://",
        ),
        (["status", "-i", LINE.replace(":1/", ":70000/")], "this is not an invitation"),
        (
            ["status", "-i", "/nowhere/file"],
            "cannot read an invitation from /nowhere/file",
        ),
        (["relay", LINE], "this is not a relay's ticket: it begins with weft-relay://"),
        (["invite", "nowhere"], "'nowhere' is no address of a relay; give host:port"),
        (
            ["join", "-i", LINE, "--reach", "a=1"],
            "'a=1' is not of the form --reach PEER:NAME=PORT",
        ),
        (
            ["join", "-i", LINE, "--expose", "a=0"],
            "'a=0' is not of the form --expose NAME=PORT",
        ),
        (
            ["join", "-i", LINE, "--share", "/nowhere"],
            "--share /nowhere is not a folder",
        ),
    ],
)
def test_mistakes_cost_a_line(
    words: list[str], said: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEFT_INVITATION", raising=False)
    code, _, err = command("peer", *words)
    assert code == 2 and said in err and err.count("\n") == 1 and "000000" not in err, (
        "and no secret is shown"
    )


def test_an_invitation_is_a_line_that_hides_its_secret(tmp_path: Path) -> None:
    ticket, invitation = invite("[::1]:7")
    assert (
        read_invitation(str(invitation)) == invitation
        and read_ticket(f"{ticket}\n") == ticket
    )
    (tmp_path / "line").write_text(f"{invitation}\n")
    assert read_invitation(str(tmp_path / "line")) == invitation
    assert invitation.secret.hex() not in repr(
        invitation
    ) and invitation.secret.hex() not in str(ticket)
    assert ticket.key.hex() not in str(invitation) and ticket.token not in repr(ticket)
