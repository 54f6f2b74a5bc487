"""An invitation: one line of text with where the relay is, which key it has, and the secret that members share."""

import hashlib
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from weft.errors import UsageError

#: The variable that holds the invitation, or the name of a file with it, where no command line gives it.
VARIABLE = "WEFT_INVITATION"
_FORM = r"{scheme}://([0-9a-f]{{64}})@(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):(\d{{1,5}})/([0-9a-f]{{64}})"


@dataclass(frozen=True)
class Invitation:
    """Data with which a machine joins as a peer, written as one line of text.

    Attributes:
        ``host``: host of the relay.
        ``port``: port of the relay.
        ``relay``: public key of the relay, in hexadecimal.
        ``secret``: 32 bytes that only invited peers have.
    """

    host: str
    port: int
    relay: str
    secret: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"weft-peer://{self.secret.hex()}@{self.host}:{self.port}/{self.relay}"

    @property
    def where(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def token(self) -> str:
        """Text by which a peer shows the relay that the peer is invited.

        The secret cannot be derived from it, so the relay cannot join as a peer.
        """
        return self._keyed("relay").hex()

    def proof(self, prover: str, to: str) -> bytes:
        """Return a proof that one peer knows the secret, as bytes; only the peer ``to`` accepts it.

        ``prover``: public key of the peer that knows the secret; ``to``: public key of the peer that accepts the proof.
        """
        return self._keyed(f"{prover} to {to}")

    def _keyed(self, text: str) -> bytes:
        return hashlib.blake2b(
            text.encode(), key=self.secret, digest_size=32, person=b"weft peers"
        ).digest()


@dataclass(frozen=True)
class Ticket:
    """Data with which a machine runs a relay, written as one line of text.

    Attributes:
        ``host``: host at which peers reach the relay.
        ``port``: port of the relay.
        ``key``: private key of the relay, 32 bytes.
        ``token``: text by which invited peers show that they are invited (:attr:`Invitation.token`).
    """

    host: str
    port: int
    key: bytes = field(repr=False)
    token: str = field(repr=False)

    def __str__(self) -> str:
        return f"weft-relay://{self.token}@{self.host}:{self.port}/{self.key.hex()}"


def invite(where: str) -> tuple[Ticket, Invitation]:
    """Create an invitation to a relay at ``where`` (``host:port``), with new keys.

    Returns the ticket with which a machine runs the relay, and the invitation for the peers. Raises :class:`UsageError`
    if ``where`` has another form.
    """
    from weft.peers.transport import public_key

    if not (
        match := re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):(\d{1,5})", where)
    ):
        raise UsageError(
            f"{where!r} is no address of a relay; give host:port, as all peers can reach it"
        )
    key = secrets.token_bytes(32)
    invitation = Invitation(
        match[1], int(match[2]), public_key(key), secrets.token_bytes(32)
    )
    return Ticket(match[1], int(match[2]), key, invitation.token), invitation


def read_invitation(text: str | None = None) -> Invitation:
    """Read an invitation. ``text``: the invitation's line, or the path of a file that holds the line.

    Without ``text`` the environment variable ``WEFT_INVITATION`` holds the line or the path. Raises :class:`UsageError`
    if there is no invitation or it is malformed.
    """
    secret, host, port, relay = _match(
        text or os.environ.get(VARIABLE, ""), "weft-peer", "an invitation"
    ).groups()
    return Invitation(host, int(port), relay, bytes.fromhex(secret))


def read_ticket(text: str) -> Ticket:
    """Read a relay's ticket. ``text``: the ticket's line, or the path of a file that holds the line.

    Raises :class:`UsageError` if it is malformed.
    """
    token, host, port, key = _match(text, "weft-relay", "a relay's ticket").groups()
    return Ticket(host, int(port), bytes.fromhex(key), token)


def read_key(file: Path) -> bytes:
    """Read a peer's private key (32 bytes) from ``file``, which holds 64 hexadecimal digits.

    A missing file is created with a new key. Raises :class:`UsageError` if the file cannot be read or holds no key.
    """
    try:
        with (
            suppress(FileExistsError),
            open(
                os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
            ) as new,
        ):
            new.write(secrets.token_hex(32))
        key = bytes.fromhex(file.read_text().strip())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read a key from {file}: {error}") from None
    if len(key) != 32:
        raise UsageError(f"{file} holds no key: it has 64 hexadecimal digits")
    return key


def _match(text: str, scheme: str, what: str) -> re.Match[str]:
    """Match the four parts of a line. No message shows the line: it holds a secret."""
    if not text:
        raise UsageError(
            f"there is no invitation: give one, or set {VARIABLE} (`weft peer invite` makes one)"
        )
    if "://" not in text:
        try:
            text = Path(text).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"cannot read {what} from {text}: {getattr(error, 'strerror', error)}"
            ) from None
    match = re.fullmatch(_FORM.format(scheme=scheme), text.strip())
    if not match or not 0 < int(match[3]) < 65536:
        raise UsageError(
            f"this is not {what}: it begins with {scheme}:// and is one whole line of `weft peer invite`"
        )
    return match
