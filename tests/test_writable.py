"""The check, before the work, of whether a result can be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.errors import WeftError
from weft.writable import check_writable

LONG = "a" * 300


@pytest.mark.parametrize(("name", "folder", "said"), [
    ("file/x", False, "Not a directory; name another file"),
    ("file/x", True, "Not a directory; choose another folder"),
    ("file", True, "Not a directory; choose another folder"),
    ("there", False, "Is a directory; name another file"),
    (f"none/{LONG}", False, "File name too long; name another file"),
    (f"none/{LONG}/x", True, "File name too long; choose another folder"),
    ("circle", False, "Too many levels of symbolic links; name another file"),
    ("circle/x", True, "Too many levels of symbolic links; choose another folder"),
])  # fmt: skip
def test_what_cannot_be_written(
    tmp_path: Path, name: str, folder: bool, said: str
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(WeftError) as refused:
        check_writable(tmp_path / name, "--out", folder)
    assert str(refused.value) == f"cannot write --out {tmp_path / name}: {said}"


@pytest.mark.parametrize("folder", [False, True])
def test_nothing_is_created_or_removed(tmp_path: Path, folder: bool) -> None:
    """Neither missing folders nor a link to what is not there yet."""
    (tmp_path / "link").symlink_to("later")
    for name in ("x", "none/further/x", "link", "link/x"):
        check_writable(tmp_path / name, "--out", folder)
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a")
    check_writable(file, "--out")
    check_writable(Path("/dev/null"), "--out")
    assert file.read_text() == "a"
