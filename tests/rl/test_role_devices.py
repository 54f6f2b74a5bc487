"""GPUs of roles: those that the run itself may use, counted as PyTorch counts them, and no more than there are."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.errors import UsageError
from weft.rl import rollout_processes
from weft.rl.role_devices import (
    EngineGpus,
    HostGpu,
    check_device,
    device_environment,
    gpu_of_rank,
    gpus_for_engines,
)
from weft.rl.role_places import LocalPlace, weft_variables


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, 5")
    yield


def test_a_number_counts_the_gpus_that_the_run_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert device_environment("cuda:0") == {"CUDA_VISIBLE_DEVICES": "GPU-a"}
    assert device_environment("cuda:1") == {"CUDA_VISIBLE_DEVICES": "5"}
    assert device_environment("cpu") == {"CUDA_VISIBLE_DEVICES": ""}
    assert device_environment("cuda") == device_environment("") == {}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert device_environment("cuda:1") == {"CUDA_VISIBLE_DEVICES": "1"}


def test_every_process_has_a_gpu_of_its_own() -> None:
    check_device("roles.reference.device", "cuda", 2)
    with pytest.raises(UsageError, match="3 processes each need a GPU of this machi"):
        check_device("roles.reference.device", "cuda", 3)
    with pytest.raises(UsageError, match=r"'cuda:1' is one GPU, and 2 processes"):
        check_device("roles.reference.device", "cuda:1", 2)


@pytest.mark.parametrize(
    ("device", "placed", "gpus"),
    [
        ("cuda", False, ["GPU-a", "5"]),
        ("cuda", True, []),
        ("cuda:1", False, []),
        ("cpu", False, []),
        ("", False, ["5"]),
        ("", True, []),
    ],
)
def test_engines_get_the_gpus_in_turn(
    monkeypatch: pytest.MonkeyPatch, device: str, placed: bool, gpus: list[str]
) -> None:
    """Left out, those that no rank of this host trains on; a GPU of another host counts for nothing here."""
    given: dict[str, Any] = {}
    lines = list[str]()
    used = [gpu_of_rank(torch.device("cuda", 0)), HostGpu("elsewhere", "5"), None]
    monkeypatch.setattr(
        rollout_processes,
        "EngineProcesses",
        lambda *words, **named: given.update(named),
    )
    endpoint: Any = SimpleNamespace(address=("127.0.0.1", 1))
    places = [LocalPlace()] * 2 if placed else []
    rollout_processes.start_rollout_engines(
        2, endpoint, "", lines.append, device=device, places=places, used=used
    )
    assert [*given["gpus"]] == gpus
    said = "engine-0 on GPU 5, engine-1 on GPU 5, which the policy does not use"
    assert lines == [f"rollouts: {said}"] * (gpus == ["5"])


def test_where_the_policy_uses_all_gpus_engines_share_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = [gpu_of_rank(torch.device("cuda", index)) for index in range(2)]
    shared = gpus_for_engines("", 3, used)
    assert shared.names == ["GPU-a", "5"]
    assert shared.line.endswith("engine-2 on GPU GPU-a, as the policy uses all GPUs")
    # a policy on the CPU leaves all
    assert gpus_for_engines("", 1, [gpu_of_rank(torch.device("cpu"))]).names == shared.names  # fmt: skip
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpus_for_engines("", 3, []) == EngineGpus([])


def test_other_hosts_get_no_names_of_this_hosts_gpus() -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "WEFT_X": "1", "RANK": "0"}
    assert weft_variables(hidden | {"HOME": "/"}) == hidden
    assert weft_variables({"CUDA_VISIBLE_DEVICES": "GPU-a"}) == {}
