"""Updates in shared memory: aggregators in processes of their own add them up without a copy through a pipe (LIFL).

An update is written into a free slot of shared memory, and its aggregator is sent the number of the slot and a weight,
some bytes. The aggregator adds the slot to its sum where it stands, and frees the slot. An aggregator is started when
the first update needs it, and stays for the next sums.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

import torch

from weft.errors import WeftError
from weft.federated.aggregation_tree import TreeAggregator
from weft.net.child_pipe import Child, PipeEnd, call_in_child, open_child, parent_pipe

Tensors = Mapping[str, torch.Tensor]
#: Where a tensor begins in a slot: at multiples of so many bytes.
ALIGNMENT = 64
#: Seconds within which an aggregator answers.
ANSWER_S = 120.0
#: Sums that a tree of three levels (leaf, middle, top) holds beside the updates that wait.
LEVELS = 3


class TensorPlace(NamedTuple):
    """Place of a tensor in a slot of shared memory: its name, shape and dtype, and the index in the slot of its first
    byte.
    """

    name: str
    shape: list[int]
    dtype: str
    begin: int


class SlotForm(NamedTuple):
    """Layout of a slot, a piece of shared memory that holds one update: places of the update's tensors, and the slot's
    size in bytes.
    """

    places: list[TensorPlace]
    size: int


def slot_form(update: Tensors) -> SlotForm:
    """Return the layout of a slot (a piece of shared memory) for the tensors of ``update``. It fits every update of the
    same names and shapes.
    """
    places, begin = [], 0
    for name, tensor in update.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append(TensorPlace(name, list(tensor.shape), dtype, begin))
        size = tensor.numel() * tensor.element_size()
        begin += math.ceil(size / ALIGNMENT) * ALIGNMENT
    return SlotForm(places, begin)


def open_memory(size: int) -> int:
    """Return a file descriptor of ``size`` bytes of memory, which this process and its children share.

    The memory is freed when the last of these processes has ended, even if it was killed.
    """
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("weft-updates")
    else:
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
    os.ftruncate(handle, size)
    return handle


def slot_tensors(
    memory: mmap.mmap, form: SlotForm, slot: int
) -> dict[str, torch.Tensor]:
    """Return the tensors in slot number ``slot`` by name, as views of the shared ``memory``. ``form``: layout of a
    slot.
    """
    tensors = {}
    for place in form.places:
        count = math.prod(place.shape)
        flat = torch.frombuffer(
            memory, dtype=getattr(torch, place.dtype), count=count, offset=slot * form.size + place.begin
        )  # fmt: skip
        tensors[place.name] = flat.view(place.shape)
    return tensors


class SharedUpdates:
    """Computes weighted sums of updates by an aggregator in a process of its own, which reads them in shared memory.

    It is called like :func:`weft.federated.weighted_sum.weighted_sum`. ``fan_in``: number of updates, or of sums, that
    a node of the aggregation tree adds up, at least 3. Waiting updates and the sums of a tree of three levels together
    take the memory of at most ``fan_in + 1`` updates.
    """

    def __init__(self, fan_in: int) -> None:
        if fan_in < LEVELS:
            raise ValueError(
                f"fan_in = {fan_in} leaves no room for an update; it is {LEVELS} or more"
            )
        self._fan_in = fan_in
        self.slots = fan_in + 1 - LEVELS
        self._child: Child | None = None
        self._memory: mmap.mmap | None = None
        self._form: SlotForm | None = None
        self._waiting = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def __call__(
        self, differences: Sequence[Tensors], weights: Sequence[float]
    ) -> dict[str, torch.Tensor]:
        """Return ``sum_i weights_i differences_i`` by name. Raises :class:`ValueError` if there are none."""
        if not differences:
            raise ValueError("there is no update to add up")
        for difference, weight in zip(differences, weights, strict=True):
            self.add(difference, weight)
        return self.finished()

    def add(self, update: Tensors, weight: float) -> None:
        """Write an update into shared memory for the aggregator to add, multiplied by ``weight``.

        Waits for a free slot.
        """
        self._start(update)
        assert self._memory is not None and self._form is not None
        slot = self._waiting
        if self._waiting == self.slots:
            slot = int(self._answer())
        else:
            self._waiting += 1
        for name, tensor in slot_tensors(self._memory, self._form, slot).items():
            tensor.copy_(update[name])
        self._send([slot, weight])

    def finished(self) -> dict[str, torch.Tensor]:
        """Return the weighted sum of all updates since the last call."""
        assert self._memory is not None and self._form is not None
        while self._waiting:
            self._answer()
            self._waiting -= 1
        self._send(["finish", 0.0])
        self._answer()
        total = slot_tensors(self._memory, self._form, 0)
        return {name: tensor.clone() for name, tensor in total.items()}

    def peak(self) -> int:
        """Return the largest number of updates and sums that were in memory at the same time."""
        self._send(["peak", 0.0])
        return int(self._answer()) + self.slots

    def close(self) -> None:
        """End the aggregator's process, and free the shared memory."""
        if self._child is not None:
            self._child.pipe.close()
            with suppress(Exception):
                self._child.process.wait(5)
            if self._child.process.poll() is None:
                self._child.process.kill()
                self._child.process.wait()
            self._child = None
        if self._memory is not None:
            # unmapped when the last tensor over it is gone
            self._memory = self._form = None

    def _start(self, update: Tensors) -> None:
        form = slot_form(update)
        if self._form is not None and form != self._form:
            if self._waiting:
                raise WeftError(
                    "an update has other tensors than those before; the clients have different models"
                )
            self.close()
        if self._child is not None:
            return
        self._form = form
        size = max(ALIGNMENT, self.slots * form.size)
        handle = open_memory(size)
        try:
            self._memory = mmap.mmap(handle, size)
            self._child = open_child(
                lambda pipe: call_in_child(__name__, "serve_aggregator", pipe, handle)
            )
        finally:
            os.close(handle)
        self._send([size, [*map(list, form.places)], form.size, self._fan_in])

    def _send(self, message: list[Any]) -> None:
        assert self._child is not None
        try:
            self._child.pipe.send_bytes(_words(message))
        except OSError as error:
            raise WeftError(
                f"the aggregator process is gone ({error}); start the run again"
            ) from None

    def _answer(self) -> Any:
        """Wait for the next answer of the aggregator: a slot that is free, or that the sum is there."""
        assert self._child is not None
        pipe = self._child.pipe
        if not pipe.poll(ANSWER_S):
            raise WeftError(
                f"the aggregator process has not answered for {ANSWER_S:g} s; start the run again"
            )
        try:
            return _value(pipe.recv_bytes())
        except (EOFError, OSError):
            raise WeftError(
                "the aggregator process is gone; start the run again"
            ) from None


def serve_aggregator(handle: int, shared: int) -> None:
    """Sum updates in shared memory until the pipe is closed. Runs in a process of its own.

    ``handle``, ``shared``: file descriptors of the pipe and of the memory.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = parent_pipe(handle)
    with suppress(EOFError, OSError):
        _serve(pipe, shared)


def _serve(pipe: PipeEnd, shared: int) -> None:
    whole, places, size, fan_in = _value(pipe.recv_bytes())
    form = SlotForm([TensorPlace(*place) for place in places], size)
    memory = mmap.mmap(shared, whole)
    leaf, peak = TreeAggregator(fan_in), 0
    slots: dict[int, dict[str, torch.Tensor]] = {}
    while True:
        order, weight = _value(pipe.recv_bytes())
        if order == "finish":
            total = leaf.finished()
            assert total is not None
            for name, tensor in slot_tensors(memory, form, 0).items():
                tensor.copy_(total.tensors[name])
            pipe.send_bytes(_words(0))
        elif order == "peak":
            pipe.send_bytes(_words(peak))
        else:
            if order not in slots:
                slots[order] = slot_tensors(memory, form, order)
            leaf.add_update(slots[order], weight)
            peak = max(peak, leaf.sums)
            pipe.send_bytes(_words(order))


def _words(value: Any) -> bytes:
    return json.dumps(value).encode()


def _value(message: bytes) -> Any:
    return json.loads(message)
