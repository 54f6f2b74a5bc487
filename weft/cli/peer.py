"""``weft peer``: machines that cannot reach each other join by an invitation, share checkpoints and carry streams."""

import json
import re
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.arguments import AsJson
from weft.cli.console import print_table, warn
from weft.errors import UsageError

if TYPE_CHECKING:
    from weft.peers.quic_peer import Peer

app = typer.Typer(help="Join machines that cannot reach each other: invitations, a relay, shared checkpoints, streams.",
                  no_args_is_help=True)  # fmt: skip

_invitation = (
    "The invitation, or a file that holds it; else the variable WEFT_INVITATION."
)
Given = Annotated[
    str | None, typer.Option("--invitation", "-i", metavar="LINE", help=_invitation)
]
_expose = "Let others connect to this port of this machine, under a name."
_reach = "A port of this machine that leads to what a peer exposes."
_key = "A file with this peer's private key, created if it is missing. If not set: a new key each time."
_ticket = typer.Argument(
    metavar="TICKET",
    help="The ticket that weft peer invite has printed, or a file that holds it.",
)


@app.command("invite")
def invite_command(
    relay: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT",
            help="The address at which the relay will be reachable.",
        ),
    ],
) -> int:
    """Make an invitation, and the ticket of its relay. Both are secrets; the ticket is for the relay alone."""
    from weft.peers.invitation import invite

    ticket, invitation = invite(relay)
    print(f"{invitation}\n{ticket}")
    warn("the first line is for the peers, the second for `weft peer relay`")
    return 0


@app.command("relay")
def relay_command(
    ticket: Annotated[str, _ticket],
    bind: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Listen only on this address.")
    ] = "0.0.0.0",
) -> int:
    """Carry packets between peers that cannot reach each other, until stopped. The relay cannot read the packets."""
    import asyncio

    from weft.peers.invitation import read_ticket
    from weft.peers.relay import Relay

    relay = Relay(read_ticket(ticket), bind, _say)

    async def until_stopped() -> None:
        task = asyncio.create_task(relay.run())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(until_stopped())
    return 0


@app.command("join")
def join_command(
    given: Given = None,
    name: Annotated[
        str,
        typer.Option(
            help="This peer's name for others; by default this machine's name."
        ),
    ] = "",
    share: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Share a folder's files."),
    ] = None,
    expose: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PORT", help=_expose)
    ] = None,
    reach: Annotated[
        list[str] | None, typer.Option(metavar="PEER:NAME=PORT", help=_reach)
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help=_key)] = None,
) -> int:
    """Take part as a peer until stopped: report who comes and goes, share folders, carry streams."""
    from weft.peers.invitation import read_invitation, read_key
    from weft.peers.quic_peer import Peer

    exposed = [
        _parse(text, r"([\w.-]+)=(\d+)", "--expose NAME=PORT") for text in expose or ()
    ]
    reached = [
        _parse(text, r"([\w.-]+):([\w.-]+)=(\d+)", "--reach PEER:NAME=PORT")
        for text in reach or ()
    ]
    for folder in share or ():
        if not folder.is_dir():
            raise UsageError(f"--share {folder} is not a folder")
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with Peer(
        read_invitation(given), name, share or (), read_key(key) if key else None, _say
    ) as peer:
        for service, port in exposed:
            peer.expose(service, int(port))
        for who, service, port in reached:
            peer.reach(who, service, int(port))
            _say(f"127.0.0.1:{port} leads to {service} of {who}")
        _say(f"{peer.name} is {peer.id}")
        stopped.wait()
    return 0


@app.command("status")
def status_command(given: Given = None, as_json: AsJson = False) -> int:
    """Show the present peers, the path of their packets, and the shared files."""
    with _visitor(given) as peer:
        peer.settle()
        members = [(m.name, m.id, m.direct, m.milliseconds) for m in peer.members()]
        files = [
            (path, about.size, peer.holders(about.root))
            for path, about in peer.files().items()
        ]
    if as_json:
        print(json.dumps({
            "peers": [dict(zip(("name", "id", "direct", "milliseconds"), m, strict=True)) for m in members],
            "files": [dict(zip(("path", "bytes", "holders"), f, strict=True)) for f in files],
        }))  # fmt: skip
        return 0
    print_table(
        ("peer", "key", "way", "ms"),
        [(n, i[:10], direct or "relay", str(ms)) for n, i, direct, ms in members],
    )
    print_table(
        ("file", "bytes", "with"),
        [(path, f"{size:,}", ", ".join(who) or "-") for path, size, who in files],
    )
    return 0


@app.command("get")
def get_command(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A shared folder or file, as weft peer status lists it.",
        ),
    ],
    to: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Write the files into this folder.")
    ] = Path("."),
    given: Given = None,
) -> int:
    """Fetch shared files of peers, block by block and verified; blocks that are already there are not fetched again."""
    from weft.peers.download import download
    from weft.writable import check_writable

    check_writable(to, "--to", folder=True)
    with _visitor(given) as peer:
        peer.settle()
        fetched = download(peer, path.strip("/"), to)
    print(
        f"{len(fetched)} files, {sum(fetched.values()):,} bytes fetched to {to / Path(path).name}"
    )
    return 0


def _visitor(given: str | None) -> "Peer":
    """Return a peer for a single query, which shares nothing."""
    from weft.peers.invitation import read_invitation
    from weft.peers.quic_peer import Peer

    return Peer(read_invitation(given))


def _say(text: str) -> None:
    print(text, flush=True)


def _parse(text: str, form: str, usage: str) -> tuple[str, ...]:
    if (match := re.fullmatch(form, text)) is None or not 0 < int(
        match.groups()[-1]
    ) < 65536:
        raise UsageError(f"{text!r} is not of the form {usage}")
    return match.groups()
