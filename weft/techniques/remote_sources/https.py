"""Sources on web servers: ``https://host/data/part-{000..099}.jsonl.zst``. Folders cannot be listed there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

from weft.data.remote_store import RemoteFile, RemoteProblem
from weft.net.http_ranges import HttpProblem, http_bytes, http_file
from weft.recipe.masked import masked_address
from weft.registry import register


@register("remote", "https")
@dataclass(frozen=True)
class WebFolder:
    """The files of a web server below a folder, as a source of data files. ``address``: the folder's address."""

    address: str

    def _of(self, name: str) -> str:
        path, mark, query = name.partition("?")
        return f"{self.address}/{quote(path, safe='/%+~@:,;=&!$()*')}{mark}{query}"

    def list_files(self, name: str) -> list[RemoteFile]:
        """Return a list with the one file ``name``, with the size and version that the server states. Raises
        :class:`RemoteProblem` for a pattern, because a web server lists no files, and if the server does not answer.
        """
        if not name or any(mark in name.partition("?")[0] for mark in "*["):
            raise RemoteProblem(
                f"{masked_address(f'{self.address}/{name}')}: a web server lists no files; name each of them, as in "
                "part-{000..099}.jsonl"
            )
        address = self._of(name)
        try:
            file = http_file(address)
        except HttpProblem as problem:
            raise RemoteProblem(
                f"{masked_address(address)}: {problem}", problem.again
            ) from None
        return [RemoteFile(name, file.size, file.mark)]

    def read_from(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        """Yield the bytes of ``file`` from ``start`` to its end."""
        try:
            yield from http_bytes(self._of(file.name), start, file.mark)
        except HttpProblem as problem:
            raise RemoteProblem(str(problem), problem.again) from None
