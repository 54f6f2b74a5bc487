"""Membership among real processes that are killed, stopped, cut off, and told to come and go."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.measured import until_true

#: Seconds in which something must have happened that takes milliseconds on an idle machine.
PATIENCE_S = 60.0


class Process:
    """A member of the crew: what it said last, and all."""

    def __init__(self, number: int, **options: Any) -> None:
        given = {
            "detect": 0.6,
            "token": "secret",
            "limit": PATIENCE_S,
            "rejoins": False,
            "number": number,
        } | options
        command = [
            sys.executable,
            "-S",
            str(Path(__file__).with_name("member.py")),
            json.dumps(given),
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.pid = self.process.pid
        self.said: queue.Queue[dict[str, Any]] = queue.Queue()
        self.views: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.put(json.loads(line))

    def order(self, do: str, **what: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do} | what) + "\n")

    def wait(self, *keys: str) -> dict[str, Any]:
        """The next thing said with one of these keys."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            said = self.said.get(timeout=max(0.0, deadline - time.monotonic()))
            if "view" in said:
                self.views.append(said)
            if not {*keys}.isdisjoint(said):
                return said

    def wait_view(self, numbers: list[int]) -> dict[str, Any]:
        while True:
            said = self.wait("view", "left_out", "error")
            assert "view" in said, said
            if said["view"] == numbers:
                return said

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Crew(list[Process]):
    def __init__(
        self, count: int, dies: dict[int, list[Any]] | None = None, **options: Any
    ) -> None:
        super().__init__(
            Process(number, dies=(dies or {}).get(number), **options)
            for number in range(count)
        )
        self.all = list(self)
        self.options = options
        self.members = [one.wait("member")["member"] for one in self]
        for one in self:
            one.order("begin", members=self.members)
        time.sleep(0.1)

    def newcomer(self, **options: Any) -> Process:
        one = Process(-1, **(self.options | options))
        self.all.append(one)
        one.wait("member")
        one.order(
            "join",
            contacts=[[member["host"], member["port"]] for member in self.members],
        )
        return one

    def agree(self, numbers: list[int]) -> list[dict[str, Any]]:
        """What the members of these numbers say of the view that is just they."""
        found = [self[number].wait_view(numbers) for number in numbers]
        assert (
            len({one["epoch"] for one in found}) == 1
            and [one["me"] for one in found] == numbers
        )
        assert all(
            one["pids"] == [self[number].pid for number in numbers] for one in found
        ), "facts of somebody else"
        return found


@pytest.fixture
def crews() -> Iterator[list[Crew]]:
    made: list[Crew] = []
    yield made
    for one in [one for crew in made for one in crew.all]:
        one.end()


@pytest.fixture
def crew(crews: list[Crew], request: pytest.FixtureRequest) -> Crew:
    crews.append(Crew(**getattr(request, "param", {"count": 4})))
    return crews[-1]


def test_killed_members_are_agreed_away_at_once(crew: Crew) -> None:
    for victim, left in ((1, [0, 2, 3]), (0, [2, 3]), (3, [2])):
        start = time.time()
        crew[victim].signal(signal.SIGKILL)
        found = crew.agree(left)
        assert [one["lost"][0][0] for one in found] == [victim] * len(left)
        assert {one["why"] for one in found} <= {
            f"rank {rank} is gone" for rank in range(4)
        }
        # 0.02 s on an idle machine
        assert max(one["when"] for one in found) - start < 20
    assert crew[2].views[-1]["about"] == {"recipe": "r"}


def test_two_at_once_one_of_them_the_leader(crew: Crew) -> None:
    crew[0].signal(signal.SIGKILL)
    crew[2].signal(signal.SIGKILL)
    crew.agree([1, 3])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "dies", [["propose", 0], ["propose", 1], ["commit", 0], ["commit", 1]]
)
def test_leader_lost_in_the_agreement(crews: list[Crew], dies: list[Any]) -> None:
    crews.append(crew := Crew(4, dies={0: dies}))
    crew[3].signal(signal.SIGKILL)
    found = crew.agree([1, 2])
    assert dies[0] == "propose" or found[0]["epoch"] > 2, (
        "what all have acknowledged, one may have begun"
    )
    assert [one["view"] for one in crew[1].views] == (
        [[0, 1, 2], [1, 2]] if dies == ["commit", 1] else [[1, 2]]
    )


def test_acknowledging_member_lost_in_the_agreement(crews: list[Crew]) -> None:
    crews.append(crew := Crew(4, dies={2: ["ack", 0]}))
    crew[3].signal(signal.SIGKILL)
    crew.agree([0, 1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("crew", [{"count": 4, "rejoins": True}], indirect=True)
def test_stopped_member_is_left_out_and_comes_back(crew: Crew) -> None:
    start = time.time()
    crew[0].signal(signal.SIGSTOP)
    found = crew.agree([1, 2, 3])
    assert {one["lost"][0][2] for one in found} == {
        "is stopped"
    } and time.time() - start < PATIENCE_S / 2
    crew[0].signal(signal.SIGCONT)
    assert "found that it is stopped" in crew[0].wait("left_out")["left_out"]
    assert crew[0].wait_view([1, 2, 3, 4])["me"] == 4
    for number in (1, 2, 3):
        crew[number].wait_view([1, 2, 3, 4])


def test_half_of_the_machine_stopped(crew: Crew) -> None:
    for number in (0, 1):
        crew[number].signal(signal.SIGSTOP)
    crew.agree([2, 3])
    for number in (0, 1):  # what they would say together counts for nothing
        crew[number].signal(signal.SIGCONT)
    assert (
        crew[0].wait("left_out", "view")["left_out"]
        and crew[1].wait("left_out", "view")["left_out"]
    )


@pytest.mark.slow
def test_all_stopped_for_a_while_and_one_killed_later(crew: Crew) -> None:
    for one in crew:
        one.signal(signal.SIGSTOP)
    time.sleep(1.5)
    for one in crew:
        one.signal(signal.SIGCONT)
    time.sleep(0.5)
    assert all(one.said.empty() for one in crew), "a pause of all is nobody's loss"
    crew[2].signal(signal.SIGKILL)
    crew.agree([0, 1, 3])


def test_busy_member_is_waited_for(crew: Crew) -> None:
    """A process that gets no core, or holds the interpreter, is silent as a stopped one is; it is not lost."""
    for _ in range(60):  # far from running, never stopped when looked at for long
        crew[1].signal(signal.SIGSTOP)
        time.sleep(0.02)
        crew[1].signal(signal.SIGCONT)
        time.sleep(0.002)
    assert all(one.said.empty() for one in crew)


def test_joining_and_leaving(crew: Crew) -> None:
    newcomer = crew.newcomer()
    for one in [*crew, newcomer]:
        assert one.wait_view([0, 1, 2, 3, 4])["lost"] == []
    crew.append(newcomer)
    crew[1].order("leave")
    assert crew[1].wait("left_out")["asked"]
    assert {tuple(one["lost"][0]) for one in crew.agree([0, 2, 3, 4])} == {
        (1, 1, "left")
    }
    crew[4].order("remove", number=0)
    assert crew[0].wait("left_out")["asked"]
    crew.agree([2, 3, 4])


@pytest.mark.parametrize("dies", [["dial", 2], ["ack", 0]])
def test_newcomer_lost_while_it_joins(crew: Crew, dies: list[Any]) -> None:
    crew.newcomer(dies=dies)
    third = crew.newcomer()
    for one in [*crew, third]:
        while (said := one.wait("view"))["view"][:4] != [
            0,
            1,
            2,
            3,
        ] or third.pid not in said["pids"]:
            pass
        assert len(said["view"]) == 5


@pytest.mark.slow
def test_minority_waits_and_the_majority_goes_on(crews: list[Crew]) -> None:
    crews.append(crew := Crew(5, limit=5.0))
    ports = [member["port"] for member in crew.members]
    for number in range(5):
        crew[number].order("cut", ports=ports[:2] if number >= 2 else ports[2:])
    crew.agree([2, 3, 4])
    # its link is up again, but the others' ends of it are not yet
    crew[1].order("cut", ports=[])
    for number in (2, 3, 4):
        crew[number].order("cut", ports=ports[:1])
    assert (
        "found that it has not answered"
        in crew[1].wait("left_out", "view", "error")["left_out"]
    )
    ended = crew[0].wait("error", "view", "left_out")
    assert ended["error"] == "TooFew" and "cannot go on by themselves" in ended["text"]


@pytest.mark.soak
@pytest.mark.slow
def test_who_was_away_until_the_others_had_ended_ends_soon(crews: list[Crew]) -> None:
    """Stopped so long that it was left out; when it comes back, nobody listens any more."""
    crews.append(Crew(3, rejoins=True))
    crew = crews[-1]
    crew[2].signal(signal.SIGSTOP)
    crew[0].wait_view([0, 1])
    for number in (0, 1):
        crew[number].signal(signal.SIGKILL)
        crew[number].process.wait()
    crew[2].signal(signal.SIGCONT)
    begun = time.monotonic()
    said = crew[2].wait("error", "view")
    assert said["error"] == "TooFew" and time.monotonic() - begun < 0.8 * PATIENCE_S, (
        said
    )


def test_who_does_not_come_to_agree_is_not_waited_for(crews: list[Crew]) -> None:
    """It is there, and says so, but its process hangs in something that nothing can end."""
    # that a member on a busy machine needs to come as well
    patience = iter((0.5, 4, 16))

    def agreed() -> list[dict[str, Any]]:
        crews.append(Crew(3, patience=next(patience)))
        crew = crews[-1]
        crew[2].order("stuck")
        time.sleep(0.1)
        crew[0].order("report", text="Connection closed by peer")
        return [crew[number].wait("view", "left_out", "error") for number in (0, 1)]

    for said in until_true(
        agreed, lambda said: all(one.get("view") == [0, 1] for one in said), tries=3
    ):
        assert [(n, why[:30]) for n, _, why in said["lost"]] == [
            (2, "has not come back from its ste")
        ]


def test_error_of_one_ends_the_step_of_all(crew: Crew) -> None:
    crew[2].order("report", text="Connection closed by peer")
    found = crew.agree([0, 1, 2, 3])
    assert {one["why"] for one in found} == {"Connection closed by peer"} and found[0][
        "epoch"
    ] == 2


def test_fatal_error_ends_all(crew: Crew) -> None:
    crew[1].order("fatal", text="rank 1: the disk is full")
    for number in (0, 2, 3):
        said = crew[number].wait("error")
        assert (said["error"], said["text"]) == ("Fatal", "rank 1: the disk is full")


def test_the_run_ends_when_all_that_are_left_have_come_to_its_end(crew: Crew) -> None:
    for number in (0, 1, 3):
        crew[number].order("end")
    time.sleep(0.3)
    assert all(crew[number].said.empty() for number in (0, 1, 3))
    crew[2].signal(signal.SIGKILL)  # who is lost is not waited for
    for number in (0, 1, 3):
        assert "ended" in crew[number].wait("ended", "error")


@pytest.mark.sampled(2)
def test_published_facts_come_with_heartbeats(crew: Crew) -> None:
    for number, one in enumerate(crew):
        one.order("published", step=number)
    for one in crew:
        heard = one.wait("published")["published"]
        assert (
            all(
                facts == {"step": int(number)}
                for number, facts in heard.items()
                if facts
            )
            and len(heard) == 3
        )


def test_strangers_are_ignored(crew: Crew) -> None:
    open_still = []
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4000),
        b"\x00\x00\x00\x02" + bytes(16) + b"{}",
        b"\xff" * 40,
    ):
        for member in crew.members:
            stranger = socket.create_connection((member["host"], member["port"]))
            stranger.sendall(garbage)
            open_still.append(stranger)
    crews_other = Process(-1, token="another", limit=1.0)
    try:
        crews_other.wait("member")
        crews_other.order(
            "join",
            contacts=[[member["host"], member["port"]] for member in crew.members],
        )
        assert crews_other.wait("error")["text"].startswith(
            "no member of the run has answered at 127.0.0.1:"
        )
    finally:
        crews_other.end()
    assert all(one.said.empty() for one in crew)
    crew[0].signal(signal.SIGKILL)
    crew.agree([1, 2, 3])
    for stranger in open_still:
        stranger.close()


def campaign(seed: int) -> None:
    """Kills, stops, thaws and newcomers at random instants, often while the last is still being agreed on."""
    chance = random.Random(seed)
    crew = Crew(chance.randint(4, 7), rejoins=True)
    # who was stopped too shortly to be missed is still in it
    begun = {"pids": [one.pid for one in crew], "epoch": 0}
    try:
        alive, stopped = list(crew), list[Process]()
        for _ in range(chance.randint(3, 6)):
            what = chance.random()
            if what < 0.5 and len(alive) > 2:
                alive.pop(chance.randrange(len(alive))).signal(signal.SIGKILL)
            elif what < 0.7 and len(alive) > 2:
                stopped.append(alive.pop(chance.randrange(len(alive))))
                stopped[-1].signal(signal.SIGSTOP)
            elif what < 0.85 and stopped:
                alive.append(stopped.pop())
                alive[-1].signal(signal.SIGCONT)
            else:
                alive.append(crew.newcomer())
            time.sleep(chance.choice([0.0, 0.005, 0.02, 0.1, 1.0]))
        for one in stopped:
            one.signal(signal.SIGCONT)
        alive += stopped
        deadline = time.monotonic() + PATIENCE_S
        while True:  # until all that live are in one view
            for one in alive:
                while not one.said.empty():
                    one.wait("view", "left_out", "error", "member")
            last = [one.views[-1] if one.views else begun for one in alive]
            if all({*view["pids"]} == {one.pid for one in alive} for view in last):
                break
            assert time.monotonic() < deadline, [
                (one.pid, view) for one, view in zip(alive, last, strict=True)
            ]
            time.sleep(0.02)
        assert len({view["epoch"] for view in last}) == 1
    finally:
        for one in crew.all:
            one.end()


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_campaign(seed: int) -> None:
    campaign(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 200))
def test_long_campaign(seed: int) -> None:
    campaign(seed)
