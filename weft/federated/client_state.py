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

if TYPE_CHECKING:
    import torch

#: Files in the client's run folder: its key, and its tensors.
KEY, TENSORS = "client.json", "client.safetensors"


@dataclass
class ClientState:
    """State of a client that survives a restart.

    ``folder``: folder of its files; None keeps all in memory.

    Attributes:
        ``groups``: tensors by name, in groups such as ``left`` (the error of compression) and ``control``.
    """

    folder: Path | None
    groups: dict[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)

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
        if self.folder is None or not (path := self.folder / TENSORS).exists():
            return
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            stored = load_file(path)
        except (OSError, SafetensorError) as error:
            raise WeftError(
                f"cannot read {path}: {error}; remove it to go on without what compression has left out"
            ) from None
        groups = dict[str, dict[str, "torch.Tensor"]]()
        for name, tensor in stored.items():
            group, _, inner = name.partition("/")
            groups.setdefault(group, {})[inner] = tensor
        self.groups = dict(groups)

    def keep(self, group: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Store ``tensors`` as the group of this name, in memory and in the file."""
        self.groups[group] = tensors
        if self.folder is None:
            return
        from safetensors.torch import save_file

        flat = {
            f"{group}/{name}": tensor.contiguous()
            for group, named in self.groups.items()
            for name, tensor in named.items()
        }
        path = self.folder / TENSORS
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(flat, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)
