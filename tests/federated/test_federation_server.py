"""A server and its clients over real connections: what is wrong is named, nothing is lost, nobody waits for ever."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.federated.served import (
    FACTS,
    SHAPES,
    Served,
    answer,
    ending,
    next_order,
    play,
)
from weft.errors import WeftError
from weft.federated.client_state import AWAITED, TENSORS, ClientState
from weft.federated.federation_events import read_events
from weft.federated.federation_frames import answer_head
from weft.federated.plain_tensors import save_values
from weft.federated.tensor_form import flat_tensors
from weft.federated.virtual_clock import FederationEvent
from weft.federated.written_file import FileNotWritten


def test_a_round_is_the_weighted_mean_and_everybody_gets_the_last_model(
    tmp_path: Path,
) -> None:
    with Served(tmp_path, 2, clients=2) as served:
        a, b = served.link("a", samples=3), served.link("b", samples=1)
        for number in range(2):
            for link, value in ((a, 1.0), (b, 5.0)):
                order = next_order(link)
                assert order.version == number
                assert float(order.parameters["w"][0, 0]) == 2.0 * number
                link.answer(answer(order, value, samples=3 if link is a else 1))
        for link in (a, b):
            assert float(ending(link).parameters["b"][1]) == 4.0
            assert link.settled(5) is True
    kinds = [event.kind for event in read_events(tmp_path)]
    assert kinds == [
        "join",
        "join",
        "start",
        "start",
        "update",
        "update",
        *["start"] * 2,
        *["update"] * 2,
    ]
    assert all(isinstance(event, FederationEvent) for event in read_events(tmp_path))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({**FACTS, "model": "another"}, "model differs from the server's"),
        ({**FACTS, "tokenizer": "x"}, "tokens mean something else"),
        (None, "does not say which model"),
    ],
)
def test_a_client_of_another_model_is_turned_away_in_one_line(
    tmp_path: Path, facts: object, word: str
) -> None:
    with Served(tmp_path, clients=1) as served:
        link = served.link("stranger", facts)
        with pytest.raises(WeftError, match=word):
            link.next_order(20)
        assert "stranger" in served.heard("was turned away")
        assert served.server.policy.members == {}


def test_two_clients_of_one_name_and_who_has_no_invitation_are_named(
    tmp_path: Path,
) -> None:
    with Served(tmp_path, clients=2) as served:
        served.link("a")
        served.heard("a has joined")
        with pytest.raises(WeftError, match="another client is called 'a'"):
            served.link("a").next_order(20)
        with pytest.raises(OSError):
            served.dial({"client": "b"}, "another secret")
        assert "not invited" in served.heard("not invited")


@pytest.mark.parametrize(
    ("value", "change", "word"),
    [
        (math.nan, {}, "not finite numbers"),
        (math.inf, {}, "not finite numbers"),
        (1.0, {"steps": 99}, "forged update"),
        (1.0, {"samples": -1}, "no whole number"),
        (1.0, {"seconds": math.nan}, "no number from 0"),
    ],
)
def test_a_bad_update_is_refused_and_the_client_gets_work_again(
    tmp_path: Path, value: float, change: dict[str, object], word: str
) -> None:
    with Served(tmp_path, clients=2) as served:
        a, b = served.link("a"), served.link("b")
        order, other = next_order(a), next_order(b)
        a.answer(answer(order, value, **change))
        assert "client a" in served.heard(word)
        assert a.settled(20) is False
        b.answer(answer(other, 4.0))
        served.thread.join(20)
        assert served.changes[0].change.clients == ("b",)
        assert float(served.parameters["b"][0]) == 4.0


def test_a_gigantic_update_is_refused_by_what_is_usual(tmp_path: Path) -> None:
    with Served(tmp_path, 7, clients=1, largest=10.0) as served:
        a = served.link("a")
        for _ in range(6):
            order = next_order(a)
            a.answer(answer(order, 1.0))
        a.answer(answer(next_order(a), 1e6))
        assert "usual" in served.heard("norm per step")
        a.answer(answer(next_order(a), 2.0))
        assert float(ending(a).parameters["b"][0]) == 8.0


def test_three_bad_updates_in_a_row_end_the_connection(tmp_path: Path) -> None:
    with Served(tmp_path, clients=1) as served:
        a = served.link("a")
        for _ in range(3):
            a.answer(answer(next_order(a), math.nan))
            assert a.settled(20) is False
        with pytest.raises(WeftError, match="3 updates in a row were refused"):
            a.next_order(20)


def test_frames_that_are_too_large_or_mean_nothing_change_nothing(
    tmp_path: Path,
) -> None:
    with Served(tmp_path, clients=2) as served:
        a, b = served.link("a"), served.link("b")
        order, other = next_order(a), next_order(b)
        head = answer_head(answer(order, 1.0))
        a._send(head, [memoryview(bytes(8))])  # an update of 8 bytes
        served.heard("it has 8 bytes")
        order = answer(order, 1.0).order
        a._send({"kind": "nonsense"})
        served.heard("is not what it can be")
        a._send(head, [memoryview(bytes(served.forms.most + 1))])
        served.heard("largest update")
        b.answer(answer(other, 4.0))
        served.thread.join(20)
        assert float(served.parameters["b"][0]) == 4.0


def test_an_answer_that_comes_twice_or_is_replayed_counts_once(tmp_path: Path) -> None:
    with Served(tmp_path, 2, clients=2) as served:
        a, b = served.link("a"), served.link("b")
        order, other = next_order(a), next_order(b)
        first = answer(order, 1.0)
        a.answer(first)
        assert a.settled(20) is True
        a.answer(first)
        served.heard("answered twice")
        b.answer(answer(other, 3.0))
        again = next_order(a)
        a.answer(replace(first, order=replace(order, token="forged")))
        served.heard("late update of client a was dropped")
        a.answer(answer(again, 1.0))
        b.answer(answer(next_order(b), 3.0))
        assert float(ending(a).parameters["b"][0]) == 4.0
    assert [e.client for e in read_events(tmp_path) if e.kind == "update"].count(
        "a"
    ) == 2


def test_a_client_that_never_answers_is_named_and_the_round_goes_on(
    tmp_path: Path,
) -> None:
    with Served(tmp_path, 1, clients=2, patience=0.5) as served:
        a, b = served.link("a"), served.link("silent")
        next_order(b)
        a.answer(answer(next_order(a), 2.0))
        assert float(ending(a).parameters["b"][0]) == 2.0
    with Served(tmp_path / "alone", 1, clients=1, patience=0.3) as served:
        next_order(served.link("silent"))
        assert "client silent is connected and has not answered" in served.heard(
            "has not answered"
        )
        served.thread.join(20)
        assert "no client is connected" in str(served.error)


def test_a_client_whose_link_is_cut_comes_back_to_its_work(tmp_path: Path) -> None:
    with Served(tmp_path, 1, clients=1, grace=20.0) as served:
        a = served.link("a")
        order = next_order(a)
        assert a._connection is not None
        a._connection.socket.shutdown(2)
        served.heard("is back, and goes on with its work")
        a.answer(answer(order, 2.0))
        assert float(ending(a).parameters["b"][0]) == 2.0
    assert [event.kind for event in read_events(tmp_path)] == [
        "join",
        "start",
        "update",
    ]


def test_a_client_that_is_killed_and_returns_gets_its_work_anew(tmp_path: Path) -> None:
    state = ClientState(tmp_path / "a")
    with Served(tmp_path, 1, clients=1) as served:
        a = served.link("a", kept=state)
        first = next_order(a)
        a.close()
        again = served.link("a", kept=ClientState(tmp_path / "a"))
        order = next_order(again)
        assert (order.version, order.steps) == (first.version, first.steps)
        assert order.token != first.token
        again.answer(answer(order, 2.0))
        assert float(ending(again).parameters["b"][0]) == 2.0


@pytest.mark.parametrize("taken", [True, False])
def test_a_client_killed_after_its_answer_hears_whether_it_was_taken(
    tmp_path: Path, taken: bool
) -> None:
    """What it keeps, such as its control variate, is what the server has counted."""
    state = ClientState(tmp_path / "a")
    with Served(tmp_path, 2, clients=1) as served:
        a = served.link("a", kept=state)
        order = next_order(a)
        control = {"w": torch.ones(3, 2)}
        state.expect(order.token, "control", control)
        if taken:
            # the word comes to a process that is killed before it writes anything
            stored = (tmp_path / "a" / AWAITED).read_bytes()
            a.answer(answer(order, 2.0))
            next_order(a)
            # the next work begins with it
            assert "control" in state.groups
            (tmp_path / "a" / AWAITED).write_bytes(stored)
            (tmp_path / "a" / TENSORS).unlink()
        a.close()
        back = ClientState(tmp_path / "a")
        back.load()
        assert back.waiting == order.token and not back.groups
        again = served.link("a", kept=back)
        later = next_order(again)
        assert not back.waiting and ("control" in back.groups) == taken
        assert not (tmp_path / "a" / AWAITED).exists()
        assert later.version == int(taken)


def test_a_full_disk_is_no_broken_connection(tmp_path: Path) -> None:
    """A client that cannot keep what the server has counted ends, and says of which file."""
    state = ClientState(tmp_path / "a")
    with Served(tmp_path, 2, clients=1) as served:
        a = served.link("a", kept=state)
        order = next_order(a)
        state.expect(order.token, "control", {"w": torch.ones(3, 2)})
        (tmp_path / "a" / TENSORS).with_suffix(".new").mkdir()  # no file can be there
        a.answer(answer(order, 2.0))
        with pytest.raises(
            FileNotWritten, match=f"cannot write .*{TENSORS}.*make room"
        ):
            next_order(a)
        assert not [line for line in served.said if "connecting again" in line]
    with pytest.raises(FileNotWritten, match=r"x\.safetensors"):
        save_values(tmp_path / "federation.jsonl" / "x.safetensors", {"a": 1})


def test_an_update_sent_while_the_link_is_cut_arrives_once(tmp_path: Path) -> None:
    with Served(tmp_path, 1, clients=1, grace=20.0) as served:
        a = served.link("a")
        order = next_order(a)
        assert a._connection is not None
        a._connection.close()
        a.answer(answer(order, 3.0))
        assert float(ending(a).parameters["b"][0]) == 3.0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("word", ["topk:0.25", "int8", "randk:0.5", "powersgd:1"])
def test_compressed_updates_arrive_late_and_whole(tmp_path: Path, word: str) -> None:
    """What a message leaves out comes later: the model moves by nearly all that clients have sent."""
    rounds = 24
    with Served(
        tmp_path, rounds, clients=1, compress=word, compress_back=word, largest=0.0
    ) as served:
        a = served.link("a")
        play(a, lambda order: 1.0)
        served.thread.join(40)
        assert served.error is None
    moved, left = flat_tensors(served.parameters), flat_tensors(a.kept.groups["left"])
    assert (moved + left - rounds).abs().max() < 1e-9
    assert left.abs().max() < 8
    assert {name: x.shape for name, x in served.parameters.items()} == {
        n: torch.Size(s) for n, s in SHAPES.items()
    }


@pytest.mark.parametrize("lost", [False, True])
def test_secure_sums_give_the_mean_and_show_no_update(
    tmp_path: Path, lost: bool
) -> None:
    """Three clients of unequal weights; with ``lost`` one of them is gone after work was given out."""
    with Served(tmp_path, 1, clients=3, secure=True, grace=0.1) as served:
        links = {
            name: served.link(name, samples=size)
            for name, size in zip("abc", (1, 2, 3), strict=True)
        }
        orders = {name: next_order(link) for name, link in links.items()}
        seen: list[torch.Tensor] = []
        cohort = served.server._cohorts[0]
        links["a"].answer(answer(orders["a"], 1.0))
        links["b"].answer(answer(orders["b"], -2.0, samples=2))
        while len(cohort.arrived) < 2:
            time.sleep(0.01)
        seen += list(cohort.arrived.values())
        if lost:
            links["c"].close()
        else:
            links["c"].answer(answer(orders["c"], 4.0, samples=3))
        ended = ending(links["a"])
    expected = (1 - 4) / 3 if lost else (1 - 4 + 12) / 6
    assert float(ended.parameters["b"][0]) == pytest.approx(expected, abs=1e-10)
    for masked in seen:  # random in all of their bits; a single one is small by chance
        assert masked.double().abs().median() > 2**50


def test_a_secure_sum_of_one_is_refused(tmp_path: Path) -> None:
    with Served(tmp_path, 1, clients=1, secure=True) as served:
        served.link("a")
        served.thread.join(20)
        assert "hides nothing" in str(served.error)


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_an_update_that_no_mask_can_hide_keeps_nobody_waiting(
    tmp_path: Path, value: float
) -> None:
    with Served(tmp_path, 1, clients=3, secure=True, grace=60.0) as served:
        links = {name: served.link(name) for name in "abc"}
        orders = {name: next_order(link) for name, link in links.items()}
        for name, sent in (("a", 1.0), ("b", 3.0), ("c", value)):
            links[name].answer(answer(orders[name], sent))
        assert float(ending(links["a"]).parameters["b"][0]) == pytest.approx(2.0)
        assert "client c was refused: it could not send one" in served.heard("refused")


def test_an_update_that_was_taken_counts_although_the_server_was_killed(
    tmp_path: Path,
) -> None:
    """Its client has forgotten its old control variate, and would disagree with the server for ever."""
    about: dict[str, object] = {"clients": 2, "policy": "scaffold", "journal": True}
    with Served(tmp_path, **about) as served:
        a, b = served.link("a"), served.link("b")
        order = next_order(a)
        next_order(b)
        first = answer(order, 2.0, extra={"control": answer(order, 7.0).difference})
        a.answer(first)
        assert a.settled(20) is True
    size = read_size(tmp_path)
    with Served(tmp_path, 2, **about) as served:
        again = served.link("a")
        order = next_order(again)
        assert order.version == 1
        assert float(order.parameters["b"][0]) == 2.0
        assert float(order.sent["control"]["b"][0]) == 3.5
        assert read_size(tmp_path) > size
        again.answer(first)  # its client has not heard that it was taken
        assert again.settled(20) is True
        assert "answered twice" in served.heard("answered twice")
    assert [event.kind for event in read_events(tmp_path)][:5] == [
        *["join"] * 2,
        *["start"] * 2,
        "update",
    ]


def read_size(folder: Path) -> int:
    return (folder / "federation.jsonl").stat().st_size


def test_a_gigantic_secure_sum_is_thrown_away_and_named(tmp_path: Path) -> None:
    """Masks hide whose update it was, so that the round is repeated; three such in a row end the run with a line."""
    with Served(tmp_path, 9, clients=2, secure=True, largest=10.0) as served:
        a, b = served.link("a"), served.link("b")
        for number in range(9):
            for link in (a, b):
                gigantic = link is b and number > 5
                link.answer(answer(next_order(link), 1e4 if gigantic else 1.0))
        served.thread.join(20)
        assert (
            len([line for line in served.said if "was thrown away: its norm" in line])
            == 3
        )
        assert "3 secure sums in a row were refused" in str(served.error)
        assert float(served.parameters["b"][0]) == 6.0
