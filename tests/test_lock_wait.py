"""A lock that another process holds: waited for with signs of life, and with a line that names the holder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from weft import lock_wait
from weft.cache import locked


def test_who_waits_says_so_and_gets_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, signs = tmp_path / "lock", list[int]()
    holder = os.open(path, os.O_CREAT | os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)

    def sign() -> None:
        signs.append(len(signs))
        if len(signs) == 3:
            os.close(holder)

    monkeypatch.setattr(lock_wait, "SIGNS_OF_LIFE", [sign])
    monkeypatch.setattr(lock_wait, "SILENT_S", 0.0)
    with locked(path), open(path) as other:
        assert len(signs) == 3
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    said = capsys.readouterr().err.splitlines()
    assert f"{os.getpid()} waits for process {os.getpid()}, which holds {path}" in said[0]  # fmt: skip
    assert not path.exists()
