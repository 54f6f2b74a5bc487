"""Trajectories of agents go out and come in exactly, as ATIF 1.7 and as the Agent Data Protocol."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.data.test_chat_data import ADP, ATIF
from weft.data.chat.chat_turns import ConversationError
from weft.data.chat.forms import read_record
from weft.data.chat.trajectory import Observed, ToolUse, Trajectory, Turn, TurnTokens
from weft.data.chat.trajectory_records import (
    adp_record,
    adp_trajectory,
    atif_record,
    atif_trajectory,
)
from weft.errors import WeftError

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object"}},
}


def drawn(seed: int, empty: str = "") -> Trajectory:
    """A trajectory of random turns, as an episode makes them. ``empty``: stands for words that are missing."""
    draw = random.Random(seed)
    text = lambda: draw.choice([empty, "a b", "é\n\u2028", '"}', "<tool_call>", "0"])  # noqa: E731
    turns = [Turn(draw.choice(["system", "user"]), text())]
    if draw.random() < 0.5:
        turns.append(Turn("user", text()))
    ids: tuple[int, ...] = tuple(draw.randrange(99) for _ in range(3))
    calls = 0
    for _ in range(draw.randrange(1, 5)):
        used = []
        for _ in range(draw.randrange(3)):
            calls += 1
            arguments = {"x": [1, None, {"y": draw.random()}]}
            used.append(ToolUse(f"c{calls}", "add", arguments))
        seen = [Observed(text(), call.id) for call in used]
        if draw.random() < 0.3:
            seen.append(Observed(text()))
        written = tuple(draw.randrange(99) for _ in range(draw.randrange(1, 5)))
        chances = tuple(-draw.expovariate(1) for _ in written)
        tokens = TurnTokens(ids, written, chances, ((0, 3), (2, 4)), draw.choice(["stop", "length"]))  # fmt: skip
        reward = draw.choice([None, 0.1, 1.0])
        reasoning = draw.choice([None, "", "hm"])
        turns.append(Turn("agent", text(), reasoning, tuple(used), tuple(seen), reward, tokens))  # fmt: skip
        ids = (*ids, *written, *(draw.randrange(99) for _ in range(2)))
    tools = draw.choice([None, (TOOL,)])
    return Trajectory(f"t{seed}", tuple(turns), tools, {"answer": 3, "more": [text()]})


def through_json(record: dict[str, Any]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(record))
    return read


def test_trajectories_come_back_as_they_went() -> None:
    for trajectory in map(drawn, range(100)):
        assert atif_trajectory(through_json(atif_record(trajectory))) == trajectory
        bare = trajectory.without_tokens()
        assert adp_trajectory(through_json(adp_record(trajectory))) == bare
        # and through the other format
        crossed = adp_trajectory(adp_record(atif_trajectory(atif_record(trajectory))))
        assert crossed == bare


def test_tokens_are_kept_to_the_last_bit() -> None:
    """The sequence is what the policy has read and written, in its order."""
    trajectory = next(t for t in map(drawn, range(9)) if len(t.turns) > 4)
    text = atif_trajectory(through_json(atif_record(trajectory))).sequence()
    assert text == trajectory.sequence()
    turns = [turn.tokens for turn in trajectory.turns if turn.tokens]
    assert len(turns) > 1
    assert text.ids == [*turns[-1].prompt, *turns[-1].ids]
    written = [i for turn in turns for i in turn.ids]
    chances = [c for turn in turns for c in turn.log_probabilities]
    pairs = list(zip(*text, strict=True))
    assert [i for i, learns, _ in pairs if learns] == written
    assert [c for _, learns, c in pairs if learns] == chances
    assert all(c == 0 for _, learns, c in pairs if not learns)


def test_tokens_of_text_that_was_tokenized_again_are_refused() -> None:
    first = Turn("agent", tokens=TurnTokens((1, 2), (3, 4), (-1.0, -1.0)))
    again = Turn("agent", tokens=TurnTokens((1, 2, 34, 5), (6,), (-1.0,)))
    with pytest.raises(WeftError, match=r"t: the tokens before turn 2 are not those"):
        Trajectory("t", (first, again)).sequence()


def test_records_of_others_are_read() -> None:
    """A record of another program is read, and what is written of it reads as the same."""
    adp = adp_trajectory(ADP)
    assert adp_trajectory(through_json(adp_record(adp))) == adp
    assert [turn.source for turn in adp.turns] == ["user", "agent", "agent", "agent"]
    assert [call.name for turn in adp.turns for call in turn.calls] == ["add", "python"]
    atif = atif_trajectory(ATIF)
    assert atif_trajectory(through_json(atif_record(atif))) == atif
    assert [turn.source for turn in atif.turns][:2] == ["system", "user"]
    assert atif.tools is not None


def test_what_is_written_reads_as_conversations() -> None:
    """Weft's own reader of conversations takes both records, with the same calls."""
    for seed in range(12):
        trajectory = drawn(seed, "-")
        used = [call.arguments for turn in trajectory.turns for call in turn.calls]
        for record in (atif_record(trajectory), adp_record(trajectory)):
            messages = read_record(record).messages
            calls = [call for m in messages for call in m.get("tool_calls", ())]
            assert [call["function"]["arguments"] for call in calls] == used
            assert messages[0]["role"] == trajectory.turns[0].source


def test_the_links_are_those_that_the_protocol_wants() -> None:
    """Each call that is followed by an observation has an id, and each id is answered once (schema of the protocol)."""
    for seed in range(30):
        content = adp_record(drawn(seed))["content"]
        actions = [i for i in content if i["class_"] == "api_action"]
        seen = [i for i in content if i["class_"] == "text_observation"]
        links = [i["tool_call_id"] for i in actions if "tool_call_id" in i]
        answers = [i["tool_call_id"] for i in seen if "tool_call_id" in i]
        assert sorted(links) == sorted(answers) and len({*links}) == len(links)
        assert {i["source"] for i in seen} <= {"user", "environment"}


def test_calls_that_nothing_answers() -> None:
    cut = Turn("agent", "", None, (ToolUse("c1", "add", {}),))
    asked = Turn("user", "?")
    last = Trajectory("t", (asked, cut))
    assert adp_trajectory(adp_record(last)) == last
    assert atif_trajectory(atif_record(last)) == last
    assert "tool_call_id" not in adp_record(last)["content"][1]
    between = Trajectory("t", (asked, cut, asked))
    with pytest.raises(ConversationError, match=r"content\[1\] calls 'add'.*'c1'"):
        adp_record(between)
    nameless = Trajectory("t", (asked, Turn("agent", "", None, (ToolUse(None, "add", {}),))))  # fmt: skip
    assert atif_trajectory(atif_record(nameless)) == nameless
    assert adp_trajectory(adp_record(nameless)) == nameless


def test_dangling_links_are_refused_with_their_index() -> None:
    record = adp_record(drawn(5))
    links = [n for n, i in enumerate(record["content"]) if "tool_call_id" in i]
    assert links
    for index in links:
        content = [dict(item) for item in record["content"]]
        content[index]["tool_call_id"] = "nobody"
        with pytest.raises(ConversationError, match=r"content\[\d+\].*(nobody|answers)"):  # fmt: skip
            adp_trajectory(record | {"content": content})
    atif = atif_record(drawn(5))
    number, step = next((n, s) for n, s in enumerate(atif["steps"], 1) if "tool_calls" in s)  # fmt: skip
    step["observation"]["results"][0]["source_call_id"] = "nobody"
    with pytest.raises(ConversationError, match=rf"step {number} .*'nobody'"):
        atif_trajectory(atif)
    other = atif_record(drawn(5))
    agent = next(s for s in other["steps"] if s["source"] == "agent")
    agent["metrics"]["logprobs"].append(-1.0)
    with pytest.raises(ConversationError, match=rf"step {agent['step_id']} has"):
        atif_trajectory(other)


def test_malformed_facts_are_named() -> None:
    """Of tokens in ATIF, and of what Weft itself has written into the other format."""
    for change in (
        {"metrics": 3},
        {"metrics": {"completion_token_ids": ["a"]}},
        {"metrics": {"completion_token_ids": [1], "logprobs": [{"logprob": -1}]}},
        {"metrics": {"completion_token_ids": [1], "logprobs": [-1], "extra": {"versions": [1]}}},
        {"extra": {"reward": "much"}},
    ):  # fmt: skip
        record = atif_record(drawn(5))
        record["steps"][-1] |= change
        with pytest.raises(ConversationError, match=rf"step {len(record['steps'])}: "):
            atif_trajectory(record)
    for details in ({"turns": [99]}, {"turns": "all"}, {"unanswered": {"99": "c"}}, 3):
        record = adp_record(drawn(5)) | {"details": {"weft": details}}
        with pytest.raises(ConversationError, match=r"details.weft"):
            adp_trajectory(record)
