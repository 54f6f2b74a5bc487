"""Threads that run models use the GPU of their model, and not the first one."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.generate.test_many import build
from weft.generate import engine_thread, thread_device
from weft.generate.engine import Engine
from weft.techniques.drafters.small_model import DraftModel


def test_a_certain_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cpu", "cuda", "cuda:1"):
        thread_device.use_device(torch.device(name))
    assert chosen == [torch.device("cuda:1")]


def test_threads_of_engines_and_drafters_choose_the_device_of_their_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[tuple[str, torch.device]] = []

    def use(device: torch.device) -> None:
        chosen.append((threading.current_thread().name, device))

    monkeypatch.setattr(thread_device, "use_device", use)
    monkeypatch.setattr(engine_thread, "use_device", use)
    model = build("softmax", torch.float32)
    thread = engine_thread.EngineThread(Engine(model, 64))
    thread.call(lambda: None).result(30)
    thread.close()
    DraftModel(model, ahead=1, tokens=64)._thread.submit(lambda: None).result(30)
    assert chosen == [("engine", model.mesh.device), ("draft_0", model.mesh.device)]
