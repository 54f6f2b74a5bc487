"""The reader of docs/reference/checkpoint-format.md, as it stands there: the page is enough to read a checkpoint."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_format import saved
from tests.checkpoint.test_golden import GOLDEN, META, bits, values

PAGE = Path(__file__).parents[2] / "docs/reference/checkpoint-format.md"


@pytest.fixture(scope="module")
def read() -> Any:
    (code,) = re.findall(
        r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    space: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), space)
    return space["read"]


def same(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].shape == tuple(v.shape) and found[name].tobytes() == bits(v)
        for name, v in expected.items()
    )


def test_it_reads_what_weft_saves(read: Any, tmp_path: Path) -> None:
    expected = saved(tmp_path)
    root, tensors = read(tmp_path)
    assert root["step"] == 7 and same(tensors, expected)


def test_it_reads_the_golden_files(read: Any) -> None:
    root, tensors = read(GOLDEN)
    assert META.items() <= root.items() and same(tensors, values())


@pytest.mark.parametrize(
    "file", ["weft.json", "manifest/golden-00001.json", "data/golden-00001.safetensors"]
)
def test_it_finds_damage(read: Any, tmp_path: Path, file: str) -> None:
    shutil.copytree(GOLDEN, tmp_path / "copy")
    data = (tmp_path / "copy" / file).read_bytes()
    (tmp_path / "copy" / file).write_bytes(
        data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
    )
    with pytest.raises(ValueError):
        read(tmp_path / "copy")
