"""Sources on the Hugging Face hub: ``hf://datasets/owner/name@revision/data/train-*.parquet``.

``HF_ENDPOINT`` names another hub, and ``HF_TOKEN`` is the token for what is not public. A branch is looked up once, so
that all files of a source come from one commit.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from weft.data.remote_store import RemoteFile, RemoteProblem
from weft.net.http_ranges import HttpProblem, http_bytes, http_json
from weft.paths import home_path
from weft.recipe.masked import masked_address
from weft.registry import register


class _HubPlace(NamedTuple):
    repository: str  # owner/name
    revision: str
    folder: str


@register("remote", "hf")
@dataclass(frozen=True)
class HubFolder:
    """The files of a data set on the Hugging Face hub, below a folder in it, as a source of data files. ``address``:
    the folder's address.
    """

    address: str

    @cached_property
    def _place(self) -> _HubPlace:
        match = re.fullmatch(
            r"hf://datasets/([\w.-]+/[\w.-]+?)(?:@([^/]+))?(?:/(.*))?", self.address
        )
        if match is None:
            raise RemoteProblem(
                f"{masked_address(self.address)} is no address of the hub; write hf://datasets/owner/name/data/train-*.parquet"
            )
        return _HubPlace(match[1], match[2] or "main", match[3] or "")

    @cached_property
    def _headers(self) -> dict[str, str]:
        token = os.environ.get("HF_TOKEN", "").strip()
        home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
        file = home_path(Path(home, "token"))
        if not token and file.is_file():  # of 'hf auth login'
            token = file.read_text().strip()
        return {"Authorization": f"Bearer {token}"} if token else {}

    @property
    def _hub(self) -> str:
        return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")

    def list_files(self, name: str) -> list[RemoteFile]:
        """Return the files below the folder, of the commit that the revision names now."""
        repository, revision, folder = self._place
        address = f"{self._hub}/api/datasets/{repository}/revision/{quote(revision, safe='')}?blobs=true"
        try:
            about = json.loads(http_json(address, self._headers))
            commit = str(about["sha"])
            listed = [
                RemoteFile(
                    str(entry["rfilename"]),
                    int(entry.get("size", -1)),
                    str(
                        (entry.get("lfs") or entry).get("sha256")
                        or entry.get("blobId")
                        or commit
                    ),
                    commit,
                )
                for entry in about["siblings"]
            ]
        except HttpProblem as problem:
            raise RemoteProblem(
                f"{masked_address(self.address)}: {self._answer(problem)}",
                problem.again,
            ) from None
        except (ValueError, KeyError, TypeError):
            raise RemoteProblem(
                f"{self._hub} does not answer as a hub does; check HF_ENDPOINT"
            ) from None
        below = f"{folder}/" if folder else ""
        return [
            file._replace(name=file.name.removeprefix(below))
            for file in listed
            if file.name.startswith(below)
        ]

    def read_from(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        """Yield the bytes of ``file`` from ``start`` to its end, of the commit in which it was listed."""
        repository, _, folder = self._place
        path = quote(f"{folder}/{file.name}" if folder else file.name)
        address = f"{self._hub}/datasets/{repository}/resolve/{file.version}/{path}"
        try:
            yield from http_bytes(address, start, "", self._headers)
        except HttpProblem as problem:
            raise RemoteProblem(self._answer(problem), problem.again) from None

    def _answer(self, problem: HttpProblem) -> str:
        """Return what is wrong and what to do about it."""
        if problem.status in (401, 403):
            return f"{problem}: it is not public; give consent on its page, and run 'hf auth login' or set HF_TOKEN"
        if problem.status == 404:
            return f"{problem}: the hub has no such data set or revision for you; check the name, or set HF_TOKEN"
        return str(problem)
