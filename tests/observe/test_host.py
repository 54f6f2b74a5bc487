"""What a run says of the machine that it is on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from weft.observe.host import HardwareLoad, describe_machine, git_state


def test_the_environment_names_host_versions_and_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "/x/weft",
            "train",
            "a b.toml",
            "--set",
            "data.path=https://me:word@h/x?sig=1",
        ],
    )
    monkeypatch.chdir(tmp_path)
    found = describe_machine()
    assert found[
        "command"
    ] == "weft train 'a b.toml' --set data.path=https://h/x" and found["folder"] == str(
        tmp_path
    )
    assert (
        f"PyTorch {torch.__version__}" in found["versions"]
        and " cores, " in found["host"]
    )


def test_git_state_is_the_commit_and_says_whether_it_was_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state() == ""
    (tmp_path / "a").write_text("1")
    who = ["-c", "user.name=x", "-c", "user.email=x@y"]
    for command in (["init", "-q"], ["add", "a"], [*who, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", *command], check=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout[:12]
    assert git_state() == commit
    (tmp_path / "a").write_text("2")
    assert git_state() == f"{commit} with changes"
    monkeypatch.setenv("PATH", "")
    assert git_state() == ""


@pytest.mark.parametrize(
    "problem", [None, ModuleNotFoundError("pynvml"), Exception("not permitted")]
)
def test_a_gpu_tells_what_it_may(
    monkeypatch: pytest.MonkeyPatch, problem: Exception | None
) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (2**30, 4 * 2**30))
    monkeypatch.setattr(
        "torch.cuda.utilization", mock.Mock(return_value=97, side_effect=problem)
    )
    monkeypatch.setattr("torch.cuda.power_draw", lambda device: 650_000)
    sample = HardwareLoad(torch.device("cuda"), interval=0).sample()
    assert sample is not None and sample["gpu_gib"] == 3
    assert (sample.get("gpu"), sample.get("gpu_watts")) == (
        (0.97, 650) if problem is None else (None, None)
    )


def test_hardware_is_sampled_when_it_is_time() -> None:
    hardware = HardwareLoad(torch.device("cpu"), interval=30)
    assert hardware.sample() is None
    until = time.process_time() + 0.25
    while time.process_time() < until:  # one core is busy
        pass
    hardware._sampled -= 30  # as if so many seconds had gone by
    sample = hardware.sample()
    assert sample is not None and 0 < sample["cpu"] <= 1 and sample["host_gib"] > 0
    assert set(sample) == {"cpu", "host_gib"} and hardware.sample() is None
