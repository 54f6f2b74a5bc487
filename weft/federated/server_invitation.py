"""The line of text with which a client joins a server: where the server is, and the secret that both know."""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from weft.errors import UsageError

#: The channel between server and clients, and the file of the run with the invitation.
CHANNEL, INVITATION_FILE = "federation", "invitation"
_FORM = r"weft-server(-encrypted)?://([0-9a-f]{64})@(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+|peer:[0-9a-z]+):(\d{1,5})"


@dataclass(frozen=True)
class ServerInvitation:
    """Invitation to a server: its address, and the secret that a client needs.

    Attributes:
        ``host``: host of the server as clients reach it.
        ``port``: port of the server.
        ``secret``: text that only the server and invited clients have.
        ``encrypted``: whether the server accepts only encrypted connections.
    """

    host: str
    port: int
    secret: str = field(repr=False)
    encrypted: bool = False

    def __str__(self) -> str:
        scheme = "weft-server-encrypted" if self.encrypted else "weft-server"
        return f"{scheme}://{self.secret}@{self.where}"

    @property
    def where(self) -> str:
        """The address as people write it, an IPv6 address in brackets."""
        numeric = ":" in self.host and not self.host.startswith("peer:")
        return f"[{self.host}]:{self.port}" if numeric else f"{self.host}:{self.port}"


def new_server_secret() -> str:
    """Return a new random secret for a server and its clients."""
    return secrets.token_hex(32)


def read_server_invitation(text: str) -> ServerInvitation:
    """Read an invitation. ``text``: the line, or the path of a file that holds it.

    Raises :class:`UsageError` if ``text`` is no invitation. Error lines do not show it, because it is secret.
    """
    if "://" not in text:
        try:
            text = Path(text).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"cannot read an invitation from {text}: {getattr(error, 'strerror', error)}; give the line that "
                f"begins with weft-server://, or the file {INVITATION_FILE} of the server's run"
            ) from None
    match = re.fullmatch(_FORM, text.strip())
    if not match or not 0 < int(match[4]) < 65536:
        raise UsageError(
            "this is not the invitation of a server: it begins with weft-server:// and is one whole line, which `weft "
            "train` prints for a recipe with federated.listen"
        )
    return ServerInvitation(
        match[3].strip("[]"), int(match[4]), match[2], bool(match[1])
    )


def keep_invitation(folder: Path, invitation: ServerInvitation) -> Path:
    """Write an invitation into the run's folder, readable by its owner alone. Returns the path."""
    path = folder / INVITATION_FILE
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(os.open(path, flags, 0o600), "w") as file:
        file.write(f"{invitation}\n")
    return path
