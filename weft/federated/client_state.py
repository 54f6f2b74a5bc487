"""What a client keeps from work to work, and over restarts: who it is, what compression has left out, its variate."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import WeftError
from weft.federated.written_file import writing_file

if TYPE_CHECKING:
    import torch

#: Files in the client's run folder: its key, and its tensors.
KEY, TENSORS = "client.json", "client.safetensors"
#: File in the client's run folder with what its last answer makes of its tensors if the server takes it.
AWAITED = "client-sent.safetensors"


@dataclass
class ClientState:
    """State of a client that survives a restart.

    ``folder``: folder of its files; None keeps all in memory.

    Attributes:
        ``groups``: tensors by name, in groups such as ``left`` (the error of compression) and ``control``.
        ``waiting``: token of the answer of which the server has not said whether it has taken it; "" if there is none.
        ``awaited``: the groups that this answer changes if it is taken. They are stored before the answer is sent, so
            that a client that is killed between its answer and the server's word agrees with the server afterwards.

    Methods that write raise :class:`weft.federated.written_file.FileNotWritten` if the disk refuses.
    """

    folder: Path | None
    groups: dict[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    waiting: str = ""
    awaited: dict[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)

    def key(self) -> str:
        """Return the secret by which the server recognises this client after a new connection."""
        if self.folder is None:
            return secrets.token_hex(16)
        path = self.folder / KEY
        try:
            if path.exists():
                return str(json.loads(path.read_text())["key"])
            key = secrets.token_hex(16)
            self.folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with open(os.open(path, flags, 0o600), "w") as file:
                json.dump({"key": key}, file)
        except (OSError, ValueError, KeyError) as error:
            raise WeftError(
                f"cannot read or write {path}: {error}; remove it to join as a new client"
            ) from None
        return key

    def load(self) -> None:
        """Read the tensors that an earlier process of this client has written, if any."""
        self.groups = self._read(TENSORS)[0]
        self.awaited, self.waiting = self._read(AWAITED)

    def _read(self, name: str) -> tuple[dict[str, Mapping[str, torch.Tensor]], str]:
        """Return the groups in a file, and the token in its header."""
        if self.folder is None or not (path := self.folder / name).exists():
            return {}, ""
        from safetensors import SafetensorError, safe_open

        groups = dict[str, dict[str, "torch.Tensor"]]()
        try:
            with safe_open(path, "pt") as file:
                names: list[str] = [*file.keys()]
                for key in names:
                    group, _, inner = key.partition("/")
                    groups.setdefault(group, {})[inner] = file.get_tensor(key)
                token = str((file.metadata() or {}).get("token", ""))
        except (OSError, SafetensorError) as error:
            raise WeftError(
                f"cannot read {path}: {error}; remove it to go on without what compression has left out"
            ) from None
        return dict(groups), token

    def _write(
        self, name: str, groups: Mapping[str, Mapping[str, torch.Tensor]], token: str
    ) -> None:
        if self.folder is None:
            return
        from safetensors.torch import save_file

        flat = {
            f"{group}/{inner}": tensor.contiguous()
            for group, named in groups.items()
            for inner, tensor in named.items()
        }
        path = self.folder / name
        with writing_file(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(flat, path.with_suffix(".new"), {"token": token})
            os.replace(path.with_suffix(".new"), path)

    def expect(
        self, token: str, group: str, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Store ``tensors`` as the next content of ``group``.

        They replace its present content if the server takes the answer with the token ``token`` (:meth:`settle`).
        """
        if token != self.waiting:
            self.waiting, self.awaited = token, {}
        self.awaited[group] = tensors
        self._write(AWAITED, self.awaited, token)

    def settle(self, taken: bool) -> None:
        """Keep what :meth:`expect` has stored if the server has ``taken`` the answer, else forget it."""
        if not self.waiting:
            return
        if taken:
            self.groups |= self.awaited
            self._write(TENSORS, self.groups, self.waiting)
        self.waiting, self.awaited = "", {}
        if self.folder is not None:
            with writing_file(self.folder / AWAITED):
                (self.folder / AWAITED).unlink(missing_ok=True)
