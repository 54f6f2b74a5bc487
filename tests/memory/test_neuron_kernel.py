"""Neurons by the kernel in C, against dense products."""

from __future__ import annotations

import pytest
import torch

from weft.memory import neuron_kernel
from weft.memory.neuron_kernel import FEW, gate_values, kernel_for, neuron_sums


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_it_adds_what_active_neurons_give(
    stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every token what it gets alone; records are longer than the weights, and neurons are in any record."""
    drawn = torch.Generator().manual_seed(1)
    neurons, embed, size = 40, 33, 512
    gate, up, down = (torch.randn(neurons, embed, generator=drawn).to(stored) for _ in "gud")  # fmt: skip
    monkeypatch.setattr(neuron_kernel, "SHARED", 4)
    for tokens, threads, known in ((1, 1, False), (3, 3, True), (FEW, 2, False)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        x = torch.randn(tokens, embed, generator=drawn)
        kernel = kernel_for(x, stored)
        if kernel is None:
            pytest.skip("no compiler")
        gates = gate_values(kernel, x, gate)
        torch.testing.assert_close(gates, (x @ gate.float().t()).relu())
        active = torch.rand(tokens, neurons, generator=drawn) < 0.6
        those = torch.randperm(neurons, generator=drawn)[:25].sort().values
        records = torch.randperm(neurons, generator=drawn)
        parts = (up, down) if known else (gate, up, down)
        memory = torch.zeros(neurons, size, dtype=torch.uint8)
        rows = torch.cat(parts, 1)
        memory.view(stored)[records, : rows.shape[1]] = rows
        given = gates if known else None
        found = neuron_sums(kernel, x, memory, records[those], those, active, given)
        chosen = (gates * active)[:, those] * (x @ up[those].float().t())
        torch.testing.assert_close(found, chosen @ down[those].float(), rtol=1e-4, atol=1e-4)  # fmt: skip
        given = gates[-1:] if known else None
        alone = neuron_sums(kernel, x[-1:], memory, records[those], those, active[-1:], given)  # fmt: skip
        assert torch.equal(alone[0], found[-1])


def test_it_serves_few_tokens_in_float32() -> None:
    assert kernel_for(torch.zeros(FEW + 1, 4), torch.float32) is None
    assert kernel_for(torch.zeros(1, 4, dtype=torch.double), torch.float32) is None
    assert kernel_for(torch.zeros(1, 4), torch.float16) is None
