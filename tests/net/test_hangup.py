"""Waits in gloo are ended from another thread, and the same processes go on in new groups."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.measured import until_true
from weft.net import hangup
from weft.net.hangup import HangUp, spare

LIMIT = timedelta(seconds=60)


def _count(folder: str) -> int:
    return len(os.listdir(f"/proc/self/{folder}"))


def _settled(folder: str) -> int:
    """The count that has not fallen for a second."""
    least, until = _count(folder), time.monotonic() + 1
    while time.monotonic() < until:
        time.sleep(0.05)
        if (now := _count(folder)) < least:
            least, until = now, time.monotonic() + 1
    return least


def be_rank(orders: Connection) -> None:
    """In each round: new groups, a sum in which all wait for the last rank, and a hang-up from another thread."""
    torch.set_num_threads(1)
    before, after = socket.socketpair(), socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    first: tuple[int, int] | None = None
    while order := orders.recv():
        rank, world, port = order
        ours = HangUp()
        store = dist.TCPStore(
            "127.0.0.1", port, world, rank == 0, LIMIT, wait_for_workers=False
        )
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=LIMIT
        )
        groups = [dist.new_group(list(range(world)), LIMIT) for _ in range(2)]
        # made meanwhile, and known not to be gloo's
        dialled = socket.create_connection(listener.getsockname())
        accepted = listener.accept()[0]
        spare(dialled, accepted)
        value = torch.ones(100)
        dist.all_reduce(value, group=groups[0])
        orders.send(value[0].item())
        orders.recv()
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        hung = list[float]()

        def hang_up(ours: HangUp = ours, hung: list[float] = hung) -> None:
            hung.append(time.monotonic())
            ours.hang_up()

        threading.Timer(0.5, hang_up).start()
        ended = ""
        try:
            dist.all_reduce(value, group=groups[1])
        except RuntimeError as error:
            ended = str(error)
        raised = time.monotonic()
        dist.destroy_process_group()
        ours.close()
        destroyed = time.monotonic()
        del store, groups
        for one, other in (before, after, (dialled, accepted)):
            one.send(b"!")
            assert other.recv(1) == b"!"
        for one in (dialled, accepted):
            one.close()
        until = time.monotonic() + 20
        first = first or (_settled("fd"), _settled("task"))
        while (
            _count("fd") > first[0] + 1 or _count("task") > first[1]
        ) and time.monotonic() < until:
            time.sleep(0.05)  # gloo's threads are on their way out
        orders.send(
            (ended, raised - hung[0], destroyed - raised, _count("fd"), _count("task"))
        )


@pytest.mark.slow
def test_frozen_rank_ends_no_wait_but_its_own() -> None:
    """Four ranks, one stopped; three of the same processes in new groups, one stopped; two."""
    context: Any = mp.get_context("forkserver")
    processes, pipes = [], []
    for _ in range(4):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=be_rank, args=(theirs,), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    held: dict[Connection, list[tuple[int, int]]] = {}
    try:
        for world in (4, 3, 2):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            for rank, pipe in enumerate(pipes):
                pipe.send((rank, world, port))
            assert [pipe.recv() for pipe in pipes] == [world] * world
            for pipe in pipes:
                pipe.send("wait")
            pipes.pop()  # stops itself
            for pipe in pipes:
                ended, raised_s, destroyed_s, handles, threads = pipe.recv()
                # 0.01 s on an idle machine, not the limit of 60
                assert ended and raised_s < 30 and destroyed_s < 30
                held.setdefault(pipe, []).append((handles, threads))
        assert held[pipes[0]][-1][0] <= held[pipes[0]][0][0] + 1, (
            f"handles stay: {held[pipes[0]]}"
        )
        assert held[pipes[0]][-1][1] <= held[pipes[0]][0][1], (
            f"threads stay: {held[pipes[0]]}"
        )
    finally:
        for process in processes:
            process.kill()


def stuck_in_a_wait() -> tuple[int, int]:
    """How often it is said that a wait does not end, while the main thread computes, and then in a wait."""
    with mock.patch.object(hangup, "STUCK_S", 0.3):
        return _stuck()


def _stuck() -> tuple[int, int]:
    said = list[float]()
    one = HangUp(lambda: said.append(time.monotonic()))
    one._shut = lambda: None  # type: ignore[method-assign]  # as if gloo had lost what this wakes
    one.hang_up()
    begun = time.monotonic()
    while time.monotonic() - begun < 1:
        pass
    computing = len(said)
    if dist.get_rank() == 0:
        time.sleep(1.5)
    dist.barrier()
    one.close()
    return computing, len(said)


@pytest.mark.slow
def test_a_wait_that_nothing_ends_is_found(pool: Any) -> None:
    until_true(
        lambda: pool.run(2, stuck_in_a_wait), lambda found: found == [(0, 0), (0, 1)]
    )


def test_nothing_is_shut_once_it_is_over() -> None:
    """A pass that took long finds connections of the next view's groups, which were made meanwhile."""
    begun, late, found = threading.Event(), threading.Event(), hangup._connections

    def connections() -> Any:
        begun.set()
        late.wait(10)
        return found()

    one = HangUp()
    with (
        mock.patch.object(hangup, "_connections", connections),
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        slow = threading.Thread(target=one.hang_up)
        slow.start()
        assert begun.wait(10)
        one.close()
        with (
            socket.create_connection(listener.getsockname()) as dialled,
            listener.accept()[0] as accepted,
        ):
            late.set()
            slow.join(10)
            for end in (dialled, accepted):
                end.setblocking(False)
                with pytest.raises(BlockingIOError):  # not the end of what can be read
                    end.recv(1)
