"""Whole runs that keep their checkpoints in an object store: a real SeaweedFS, good credentials and bad ones."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from bench.checkpoint_s3 import KEY, SECRET
from tests.cases import write_corpus
from tests.checkpoint.test_levels import leveled, names
from tests.checkpoint.test_resume import HOME, go, series
from tests.checkpoint.test_s3 import Proxy
from tests.cli.test_commands import TINY
from tests.conftest import Command
from tests.started import Started
from weft.checkpoint.address import open_storage
from weft.checkpoint.store import candidates, open_checkpoint, prune, verify
from weft.errors import WeftError
from weft.observe.run_metrics import read_metrics

#: Files that want the S3 server: it starts for them once, and stops after them.
TOGETHER = "s3"


def go_with(
    env: dict[str, str], values: dict[str, Any], out: str, resume: str | None = None
) -> tuple[int, int]:
    """On every rank: the run, with the credentials in ``env``."""
    with mock.patch.dict(os.environ, env):
        return go(values, out, resume)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def env(bucket: str) -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name.startswith("AWS_")
    }


@pytest.fixture
def proxy(server: int, env: dict[str, str]) -> Iterator[Proxy]:
    proxy = Proxy(server)
    env["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{proxy.port}"
    yield proxy
    proxy.server.shutdown()
    proxy.server.server_close()


@pytest.mark.soak  # every day two ranks, below
def test_saved_in_s3_by_four_ranks_resumed_by_two(
    pool: Any, corpus: str, bucket: str, env: dict[str, str], tmp_path: Path
) -> None:
    values = leveled(corpus, HOME, {"to": bucket, "every": 3, "keep": 5})
    assert pool.run(4, go_with, env, values, str(tmp_path / "whole")) == [(6, 30)] * 4
    assert (
        names(bucket) == ["step-000003", "step-000006"]
        and not (tmp_path / "whole/checkpoints").exists()
    )
    assert [p.name for p in candidates(tmp_path / "whole")] == [
        "step-000006",
        "step-000003",
    ]
    for place in candidates(bucket):
        assert verify(open_checkpoint(place)) > 0
    values = leveled(corpus, {"tp": 2}, {"to": f"{bucket}-other"})
    pool.run(2, go_with, env, values, str(tmp_path / "other"), f"{bucket}/step-000003")
    expected = {
        step: loss for step, loss in series(tmp_path / "whole").items() if step > 3
    }
    assert series(tmp_path / "other") == pytest.approx(expected, rel=1e-10)
    assert [str(p) for p in prune(bucket, 1).deleted] == [f"{bucket}/step-000003"]
    assert (
        names(bucket) == ["step-000006"]
        and not (open_storage(bucket) / "step-000003").list()
    )


def test_what_does_not_verify_is_never_all_that_stays(
    pool: Any, corpus: str, bucket: str, env: dict[str, str], tmp_path: Path
) -> None:
    pool.run(
        1,
        go_with,
        env,
        leveled(corpus, {}, {"to": bucket, "every": 2, "keep": 9}),
        str(tmp_path / "run"),
    )
    newest = open_storage(bucket) / "step-000006"
    newest.delete([next(iter(newest.list("data/")))])
    assert [p.name for p in prune(bucket, 1).deleted] == ["step-000002"]
    assert names(bucket) == ["step-000004", "step-000006"]


def test_without_credentials_nothing_starts(
    pool: Any, corpus: str, bucket: str, env: dict[str, str], tmp_path: Path
) -> None:
    env["AWS_SECRET_ACCESS_KEY"] = "EXPIREDSECRET"
    with pytest.raises(
        WeftError, match=r"cannot create s3://bucket/.*: the server answered 403"
    ) as caught:
        pool.run(
            2,
            go_with,
            env,
            leveled(corpus, {"shard": 2}, {"to": bucket}),
            str(tmp_path / "run"),
        )
    assert "EXPIREDSECRET" not in str(caught.value) and not (tmp_path / "run").exists()


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["warn", "stop"])
def test_credentials_that_expire(
    pool: Any,
    corpus: str,
    bucket: str,
    env: dict[str, str],
    tmp_path: Path,
    proxy: Proxy,
    on_error: str,
) -> None:
    """From the second checkpoint's first bytes on; with ``warn`` they are renewed for the last one."""
    again = ["step-000006"] if on_error == "warn" else []
    proxy.fault = lambda m, path: "403" if m in ("PUT", "POST") and "step-" in path and not any(
        name in path for name in ["step-000002", *again]) else ""  # fmt: skip
    values = leveled(corpus, {"shard": 2}, {"to": bucket, "every": 2, "keep": 9})
    values["checkpoint"]["on_error"] = on_error
    if on_error == "warn":
        pool.run(2, go_with, env, values, str(tmp_path / "run"))
        assert len(series(tmp_path / "run")) == 6
    else:
        with pytest.raises(
            WeftError,
            match=r"checkpoint at step 4 was not saved: cannot create s3://.*answered 403",
        ):
            pool.run(2, go_with, env, values, str(tmp_path / "run"))
    proxy.fault = lambda method, path: ""
    assert names(bucket) == ["step-000002", *again]
    assert verify(open_checkpoint(candidates(bucket)[0])) > 0
    said = [e["message"] for e in read_metrics(tmp_path / "run")["event"]]
    assert any("checkpoint at step 4 was not saved" in m for m in said) == (
        on_error == "warn"
    )


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", ["503", "drop", "lost", "slow"])
def test_a_server_with_hiccups_stops_nothing(
    pool: Any,
    corpus: str,
    bucket: str,
    env: dict[str, str],
    tmp_path: Path,
    proxy: Proxy,
    what: str,
) -> None:
    seen: list[str] = []

    def fault(method: str, path: str) -> str:
        seen.append(path)
        return what if len(seen) % 4 == 0 else ""

    proxy.fault = fault
    values = leveled(corpus, {"shard": 2}, {"to": bucket, "every": 3, "keep": 1})
    values["checkpoint"]["on_error"] = "stop"
    pool.run(2, go_with, env, values, str(tmp_path / "run"))
    proxy.fault = lambda method, path: ""
    assert (
        names(bucket) == ["step-000006"]
        and verify(open_checkpoint(candidates(bucket)[0])) > 0
    )


@pytest.mark.soak
def test_train_stop_resume_and_the_commands(
    corpus: str,
    bucket: str,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a user types it; and no credential in anything that is written, printed or shown by ``ps``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(
        TINY.format(corpus=corpus, cache=tmp_path / "cache")
    )
    shown: list[str] = []

    def weft(*words: str, code: int = 0) -> str:
        ended, out, err = command(*words)
        shown.extend([out, err])
        assert ended == code, (out, err)
        return out + err

    to = ["--set", f"checkpoint.to={bucket}", "--set", "checkpoint.every=2"]
    train = ["train", "tiny.toml", "--layout", "shard=2", "--out", "run", *to]
    process = Started(*train, "--set", "train.steps=5000", stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 300
    while not names(bucket):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    family = [
        psutil.Process(process.pid),
        *psutil.Process(process.pid).children(recursive=True),
    ]
    shown += [" ".join(one.cmdline()) for one in family]
    process.send_signal(signal.SIGTERM)
    shown.append(process.communicate(timeout=300)[0])
    assert process.returncode == 128 + signal.SIGTERM, shown[-1]
    step = int(names(bucket)[-1][5:11])
    assert f"checkpoint  {bucket}/step-{step:06d}" in shown[-1]
    said = weft("train", "tiny.toml", "--layout", "", "--out", "new", "--resume", bucket, *to,
                "--set", f"train.steps={step + 2}")  # fmt: skip
    assert f"resumed from {bucket}/step-{step:06d} at step {step}" in said
    assert f"step-{step + 2:06d}" in weft("checkpoint", "ls", bucket) and weft(
        "checkpoint", "ls", "new"
    )
    assert "whole" in weft("checkpoint", "verify", bucket) and "wq" in weft(
        "checkpoint", "inspect", bucket, "wq"
    )
    weft("checkpoint", "merge", bucket, "--out", f"{bucket}-merged")
    assert "are equal" in weft("checkpoint", "diff", bucket, f"{bucket}-merged")
    weft(
        "checkpoint",
        "convert",
        bucket,
        "--out",
        f"{bucket}-converted",
        "--no-optimizer",
    )
    weft(
        "generate",
        "--checkpoint",
        f"{bucket}-merged",
        "--prompt",
        "ab",
        "--tokens",
        "3",
    )
    weft("export", "--checkpoint", bucket, "--out", "hf")
    assert "deleted" in weft("checkpoint", "prune", bucket, "--keep-last", "1")
    assert "does not exist" in weft("checkpoint", "ls", f"{bucket}-nowhere", code=1)
    written = [
        p.read_bytes()
        for p in tmp_path.rglob("*")
        if p.is_file() and "cache" not in p.parts
    ]
    for place in map(open_storage, (bucket, f"{bucket}-merged", f"{bucket}-converted")):
        written += [place.read(name) for name in place.list()]
    for secret in (KEY, SECRET):
        assert not any(secret in text for text in shown) and not any(
            secret.encode() in data for data in written
        )
