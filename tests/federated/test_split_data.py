"""``weft data split``: every record once, a file for each client."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from weft.errors import UsageError, WeftError
from weft.federated.split_data import split_data


def records(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_records_by_class(tmp_path: Path) -> None:
    given = [{"text": f"é {n}", "label": "ab"[n % 2]} for n in range(40)]
    source = tmp_path / "all.jsonl"
    source.write_text("\n".join(json.dumps(record) for record in given))
    shares = split_data(str(source), tmp_path / "out", 2, "classes", classes=1)
    assert [share.classes for share in shares] == [{"a": 20}, {"b": 20}]
    texts = sorted(str(r["text"]) for share in shares for r in records(share.file))
    assert texts == sorted(r["text"] for r in given)
    assert json.loads((tmp_path / "out" / "partition.json").read_text())["source"] == str(source)  # fmt: skip
    with pytest.raises(UsageError, match="is not empty"):
        split_data(str(source), tmp_path / "out", 2, "even")
    with pytest.raises(UsageError, match="--label"):
        split_data(str(source), tmp_path / "no", 2, "classes", label="class")
    with pytest.raises(UsageError, match="--group"):
        split_data(str(source), tmp_path / "no", 2, "natural")
    source.write_text('{"text": 1}\nno json\n')
    with pytest.raises(WeftError, match=r"all\.jsonl:2 is not JSON"):
        split_data(str(source), tmp_path / "no", 2, "even")
    with pytest.raises(UsageError, match="does not exist"):
        split_data(str(tmp_path / "nowhere"), tmp_path / "no", 2, "even")


def test_texts_by_folder(tmp_path: Path) -> None:
    for package in ("json", "asyncio", "email"):
        (tmp_path / "lib" / package).mkdir(parents=True)
        for n in range(3):
            (tmp_path / "lib" / package / f"{n}.py").write_text(f"# {package} {n}")
    (tmp_path / "lib" / "json" / "image.png").write_bytes(b"\xff\xfe\x00\x80")
    shares = split_data(str(tmp_path / "lib"), tmp_path / "out", 3, "natural")
    folders = [{r["folder"] for r in records(share.file)} for share in shares]
    assert folders == [{"asyncio"}, {"email"}, {"json"}]
    assert [share.samples for share in shares] == [3, 3, 3]


def test_arrays(tmp_path: Path) -> None:
    source = tmp_path / "all.npz"
    np.savez(source, features=np.arange(20.0).reshape(10, 2), labels=np.arange(10) % 2)
    shares = split_data(str(source), tmp_path / "out", 3, "dirichlet", alpha=5.0)
    values = np.concatenate([np.load(share.file)["features"][:, 0] for share in shares])  # fmt: skip
    assert sorted(values) == [*range(0, 20, 2)]
