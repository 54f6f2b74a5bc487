"""A reference model in processes of its own: the same run to the last bit, bytes by formula, faults in one line."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.rl.test_rl_loader import TREE, parameters, recipe, records
from weft.api import start as train
from weft.errors import UsageError, WeftError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.recipe import Recipe
from weft.rl import rl_loader
from weft.rl.log_probabilities import token_log_probabilities
from weft.rl.reference_processes import ReferenceProcesses
from weft.rl.role_texts import NUMBER_BYTES, TOKEN_BYTES
from weft.train.setup import build_for_training, prepare

LOSS = {"start": {"steps": 0}, "loss": {"kl": "k3", "kl_weight": 0.1}}


def given(ranks: int = 1, **sections: Any) -> Recipe:
    """A run whose loss has a reference model, in ``ranks`` processes of its own."""
    roles = {"reference": {"ranks": ranks, "threads": 1}} if ranks else None
    steps = TREE["train"] | {"steps": 3, "dtype": "float64"}
    tree: dict[str, Any] = {"rl": TREE["rl"] | LOSS, "roles": roles, "train": steps}
    return recipe(**tree | sections)


def answered(
    layout: dict[str, Any] | None, ranks: int
) -> tuple[list[np.ndarray], list[np.ndarray], Any]:
    """Log-probabilities of two phases' texts by processes with ``layout``, the same by plain passes, and bytes."""
    reference = {"ranks": ranks, "threads": 1} | ({"layout": layout} if layout else {})
    job = prepare(given(roles={"reference": reference}))
    mesh = Mesh.single()
    rng = np.random.default_rng(4)
    texts = []
    for length in (5, 9, 3, 12):
        marks = np.arange(length) >= length // 2
        texts.append((rng.integers(0, 257, length).tolist(), marks.tolist()))
    model, state = build_for_training(job.shape, mesh, given(0))
    wanted = token_log_probabilities(model, state, mesh, texts, 1, 1, 16)
    processes = ReferenceProcesses(job, mesh, lambda: False)  # type: ignore[arg-type]
    try:
        for _ in range(2):
            processes.request(texts)
            got = processes.log_probabilities()
        figures = processes.take_figures()
    finally:
        processes.close()
    tokens, marked = 29, sum(sum(marks) for _, marks in texts)
    assert figures.pop("reference_s") > 0
    assert figures == {
        "reference_sent_bytes": 2 * TOKEN_BYTES * tokens,
        "reference_received_bytes": 2 * NUMBER_BYTES * marked,
    }
    assert set(processes.take_figures().values()) == {0}
    return got, wanted, figures


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (None, 1),
        pytest.param(None, 2, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_processes_give_what_the_policys_ranks_would(
    layout: dict[str, Any] | None, ranks: int
) -> None:
    got, wanted, _ = answered(layout, ranks)
    for own, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-10, atol=1e-13)
        assert (own != 0).sum() == (other != 0).sum() > 0


@pytest.mark.slow(8)
def test_a_run_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    """Without the reference model beside the policy, and with the bytes of every phase in its records."""
    beside = train(given(0), out=tmp_path / "beside")
    apart = train(given(1), out=tmp_path / "apart")
    a, b = parameters(beside), parameters(apart)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert records(apart.run, "policy")[-1]["kl"] > 0
    for phase in records(apart.run, "rollout"):
        tokens = phase["reference_sent_bytes"] / TOKEN_BYTES
        marked = phase["reference_received_bytes"] / NUMBER_BYTES
        assert marked == pytest.approx(16 * phase["length"]) and marked < tokens


@pytest.mark.slow(8)
def test_a_process_that_is_killed_ends_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = rl_loader.RlLoader._begin

    def killed(self: Any, phase: int) -> None:
        if phase == 1:
            os.kill(self.reference._processes[0].pid, signal.SIGKILL)
        begin(self, phase)

    monkeypatch.setattr(rl_loader.RlLoader, "_begin", killed)
    with pytest.raises(WeftError, match=r"the process 0 of roles.reference has ended"):
        train(given(1), out=tmp_path / "run")


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    def said(**sections: Any) -> str:
        with pytest.raises(WeftError) as error:
            prepare(given(**sections))
        return str(error.value)

    def role(**settings: Any) -> str:
        return said(roles={"reference": {"ranks": 1} | settings})

    assert "[roles.reference] is about processes" in role(ranks=0, threads=2)
    assert "has no reference model" in said(rl=TREE["rl"] | {"start": {"steps": 0}})
    assert "after these steps the reference" in said(
        rl=TREE["rl"] | LOSS | {"start": {"steps": 1}}
    )
    assert "does not divide a model over" in role(layout={"tp": 2})
    assert "no GPU; use 'cpu'" in role(device="cuda:7") or torch.cuda.is_available()
    assert role(model=str(tmp_path / "no")).startswith("roles.reference.model: ")
    with pytest.raises(UsageError, match=r"roles\.reference\.device = 'tpu'"):
        given(roles={"reference": {"device": "tpu"}})
    rollout = {"rollout": {"device": "cpu"}}
    assert "set roles.rollout.ranks, or leave" in said(roles=rollout)
    rollout["rollout"] |= {"ranks": 1, "device": "cuda:9"}
    assert "no GPU; use 'cpu'" in said(roles=rollout) or torch.cuda.is_available()
    assert given(2).roles.reference.process_layout == Layout(dp=2)
