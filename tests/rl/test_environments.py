"""Conversations of several turns: tools, environments, and the tokens of what was written."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from time import sleep
from typing import Any

import pytest

from tests import chats
from tests.techniques.test_tasks import hostile_answers
from weft.data.chat.encode import own_encoder
from weft.data.chat.trajectory import Trajectory
from weft.data.chat.trajectory_records import (
    adp_record,
    adp_trajectory,
    atif_record,
    atif_trajectory,
)
from weft.data.sample_ledger import VersionSpan
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.errors import UsageError, WeftError
from weft.recipe import Task
from weft.rl import phase_samples
from weft.rl.build_task import reward_task
from weft.rl.environment import Environment, EnvironmentStep
from weft.rl.episode import ChatTurns, Episode, PlainTurns, TurnEncoder, write_episodes
from weft.rl.episode_groups import TurnLimits, written_groups
from weft.rl.rollout import (
    AnswerGroup,
    GroupRequest,
    RewardQuestion,
    SentWeights,
    WrittenAnswer,
)
from weft.rl.scored_answers import ScoredGroup

BYTES = load_tokenizer("bytes")


def call(expression: str, name: str = "calculator") -> str:
    said = json.dumps({"name": name, "arguments": {"expression": expression}})
    return f"<tool_call>\n{said}\n</tool_call>"


class Scripted:
    """A policy that says the turns of a script, in ids of its own choice: a text character by character."""

    def __init__(self, tokenizer: Tokenizer, *scripts: Sequence[str], finished: str = "stop") -> None:  # fmt: skip
        self.tokenizer, self.scripts = tokenizer, [list(s) for s in scripts]
        self.finished_as, self.prompts = finished, list[tuple[int, ...]]()
        self.waiting: list[GroupRequest] = []
        self.seeds: list[int] = []

    def request(self, groups: Sequence[GroupRequest]) -> None:
        self.waiting = [*groups]

    def finished(self, count: int) -> list[AnswerGroup]:
        groups = []
        # those that are done have nothing left to say
        going = [script for script in self.scripts if script]
        for script, group in zip(going, self.waiting, strict=False):
            ids = [int(i) for char in script.pop(0) for i in self.tokenizer.encode(char)]  # fmt: skip
            if self.finished_as == "stop":
                ids.append(self.tokenizer.closing)
            chances = tuple(-random.Random(f"{group.prompt}/{n}").random() for n in range(len(ids)))  # fmt: skip
            self.prompts.append(group.prompt)
            self.seeds.append(group.seed)
            answer = WrittenAnswer(tuple(ids), chances, (VersionSpan(0, 7),), self.finished_as)  # fmt: skip
            groups.append(AnswerGroup(group, (answer,)))
        return groups[:count]

    def take_weights(self, version: int) -> None: ...
    def sent_weights(self) -> SentWeights:
        return SentWeights()

    def close(self) -> None: ...


def episodes(encoder: TurnEncoder, *questions: RewardQuestion, **more: Any) -> list[Episode]:  # fmt: skip
    task = reward_task(Task(reward="calculator"))
    made_of = []
    for number, question in enumerate(questions):
        environment = task.environment()
        assert environment is not None
        made_of.append(
            Episode(environment, question, encoder, name=f"q{number}", seed=number, **more)
        )  # fmt: skip
    return made_of


def written(policy: Scripted, *questions: RewardQuestion, **more: Any) -> list[Trajectory]:  # fmt: skip
    encoder = PlainTurns(policy.tokenizer)
    return write_episodes(episodes(encoder, *questions, **more), policy)


QUESTION = RewardQuestion("12*34+5=", "413")


def test_a_calculator_is_asked_and_the_answer_rewarded() -> None:
    policy = Scripted(
        BYTES,
        [f"Let me see. {call('12*34+5')}", "It is 413."],
        [call("12*34+5") + call("1/0"), call("1", "abacus"), "412"],
        ["413"],
    )
    right, wrong, guessed = written(policy, QUESTION, QUESTION, QUESTION)
    assert [t.reward for t in (right, wrong, guessed)] == [1, 0, 1]
    assert [turn.source for turn in right.turns] == ["user", "agent", "agent"]
    asked = right.turns[1]
    assert asked.message == "Let me see." and asked.calls[0].name == "calculator"
    assert [(o.id, o.content) for o in asked.observations] == [("call_1", "413")]
    seen = [o.content for turn in wrong.turns for o in turn.observations]
    assert seen[0] == "413" and seen[1].startswith("error: ZeroDivisionError")
    assert seen[2] == "error: no tool is called 'abacus'; there is calculator"
    ids = [c.id for turn in wrong.turns for c in turn.calls]
    assert ids == ["call_1", "call_2", "call_3"]
    assert len(set(policy.seeds)) == len(policy.seeds)


def test_tokens_are_those_that_were_read_and_written() -> None:
    """The policy's ids are not those that the tokenizer would write for its text, and are kept all the same."""
    tokenizer = load_tokenizer("bytes")
    policy = Scripted(tokenizer, [call("2+3"), call("7*7"), "54"])
    (trajectory,) = written(policy, QUESTION)
    text = trajectory.sequence()
    last = trajectory.turns[-1].tokens
    assert last is not None
    assert tuple(text.ids) == last.prompt + last.ids
    for turn, prompt in zip(trajectory.turns[1:], policy.prompts, strict=True):
        assert turn.tokens is not None and turn.tokens.prompt == prompt
    learned = [i for i, learns in zip(text.ids, text.learns, strict=True) if learns]
    assert learned == [i for t in trajectory.turns if t.tokens for i in t.tokens.ids]
    # a question of 8 characters and results "5" and "49" are not learned
    assert len(text.ids) - len(learned) == len(tokenizer.prompt_ids("12*34+5=")) + 3


def test_trajectories_of_episodes_go_out_and_in() -> None:
    policy = Scripted(BYTES, [call("2+3") + call("1"), "7"])
    (trajectory,) = written(policy, QUESTION)
    out = json.loads(json.dumps(atif_record(trajectory)))
    assert atif_trajectory(out) == trajectory
    assert atif_trajectory(out).sequence() == trajectory.sequence()
    adp = json.loads(json.dumps(adp_record(trajectory)))
    assert adp_trajectory(adp) == trajectory.without_tokens()


def test_episodes_end() -> None:
    turns = [call("1"), call("2"), "3"]
    (long,) = written(Scripted(BYTES, turns[:2]), QUESTION, turns=2)
    assert long.facts["ended"] == "it has had its 2 turns" and long.reward == 0
    (cut,) = written(Scripted(BYTES, turns[:1], finished="length"), QUESTION)
    assert cut.facts["ended"] == "its turn was cut off"
    (full,) = written(Scripted(BYTES, turns[:1]), QUESTION, room=60)
    assert full.facts["ended"] == "the next turn begins behind 60 tokens"
    for trajectory in (long, cut, full):
        assert trajectory.turns[-1].observations
        trajectory.sequence()


def test_an_environment_that_fails_ends_its_own_episode_alone() -> None:
    class Failing(Environment):
        """Fails at its second step."""

        steps = 0

        def step(self, action: str) -> EnvironmentStep:
            self.steps += 1
            if self.steps == 2:
                raise OSError("no more")
            return EnvironmentStep([{"role": "user", "content": "go on"}], 0.5, False)

    policy = Scripted(BYTES, ["a", "b"], [call("1"), "413"])
    failing = Episode(Failing(), QUESTION, PlainTurns(BYTES), name="f")
    (other,) = episodes(PlainTurns(BYTES), QUESTION)
    broken, whole = write_episodes([failing, other], policy)
    assert broken.facts["ended"] == "its environment raised OSError: no more"
    assert broken.turns[-1].reward is None and broken.turns[-2].reward == 0.5
    assert whole.reward == 1


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        (float("nan"), "returned nan"),
        ("much", "returned str"),
        (1e99, "returned 1e+99"),
    ],
)
def test_a_reward_of_an_environment_that_is_none_is_named(
    reward: Any, why: str
) -> None:
    """As one of a task: it was summed before, and its answer left out without a word."""

    class Odd(Environment):
        def step(self, action: str) -> EnvironmentStep:
            return EnvironmentStep([], reward, True)

    odd = Episode(Odd(), QUESTION, PlainTurns(BYTES))
    (broken,) = write_episodes([odd], Scripted(BYTES, ["a"]))
    assert broken.facts["ended"].startswith(f"its environment {why}")
    assert broken.turns[-1].reward is None


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "smollm2"])
def test_turns_are_those_of_the_chat_template(family: str, tmp_path: Path) -> None:
    """All tokens together read as the template writes the whole conversation, with each end of a turn once."""
    tokenizer = chats.tokenizer(tmp_path, family)
    encoder = own_encoder(tokenizer, family)
    policy = Scripted(tokenizer, [call("2+3"), "the user asks 5"])
    chat = ChatTurns(encoder)
    (trajectory,) = write_episodes(episodes(chat, QUESTION), policy)
    shown = tokenizer.decode(trajectory.sequence().ids)
    messages = [
        {"role": "user", "content": QUESTION.prompt},
        {"role": "assistant", "content": call("2+3")},
        {"role": "tool", "content": "5", "tool_call_id": "call_1", "name": "calculator"},
        {"role": "assistant", "content": "the user asks 5"},
    ]  # fmt: skip
    tools = [*(trajectory.tools or ())]
    ids = encoder.tokens.encode(encoder.template.render(messages, tools))[0]
    # the empty reasoning that a template writes before a last turn is the policy's own affair
    whole = tokenizer.decode(ids).replace("<think>\n\n</think>\n\n", "")
    assert whole.strip().startswith(shown.strip())
    assert trajectory.sequence().ids.count(tokenizer.closing) == [*ids].count(tokenizer.closing)  # fmt: skip


def test_groups_of_several_turns_become_samples() -> None:
    """Beside groups of single answers; what an environment has said is read and not learned."""
    scripts = ["413"], [call("2+3"), "413"], [call("1"), call("2"), "4"]
    policy = Scripted(BYTES, *scripts)
    said = [[*script] for script in scripts]
    prompt = tuple(BYTES.prompt_ids("12*34+5="))
    single, several = (GroupRequest(n, QUESTION, prompt, n - 3, 5) for n in (4, 5))
    maker = reward_task(Task(reward="calculator")).environment
    plain, group = written_groups(
        policy, [single, several], [lambda: None, maker], PlainTurns(BYTES), [TurnLimits(3, 999)] * 2
    )  # fmt: skip
    assert plain.answers[0].learns is None and plain.answers[0].reward is None
    assert [answer.reward for answer in group.answers] == [1, 0]
    assert [answer.finished for answer in group.answers] == ["stop", "stop"]
    scored = ScoredGroup(group, (1.0, 0.0), ("", ""))
    for number, turns in enumerate(said[1:]):
        arrays = phase_samples._arrays(scored, number)
        written = [[*BYTES.encode(turn), BYTES.closing] for turn in turns]
        assert arrays.ids[arrays.learns].tolist() == [i for ids in written for i in ids]
        assert not arrays.learns[: len(prompt)].any()
        assert (arrays.sampler[arrays.learns] < 0).all()
        assert (arrays.sampler[~arrays.learns] == 0).all()
        assert len(arrays.ids) > len(prompt) + sum(map(len, written))
        assert group.answers[number].versions == (VersionSpan(0, 7),)


def test_a_first_turn_without_room_is_refused() -> None:
    with pytest.raises(UsageError, match=r"q0: its first turn begins behind \d+ tokens, of at most 3"):  # fmt: skip
        written(Scripted(BYTES, ["1"]), QUESTION, room=3)


@pytest.mark.parametrize("thread", [False, True])
def test_an_environment_that_hangs_ends_its_own_episode_alone(thread: bool) -> None:
    class Hanging(Environment):
        def step(self, action: str) -> EnvironmentStep:
            while action == "hang" and not released.is_set():
                try:
                    released.wait(60)
                except Exception:
                    continue
            return EnvironmentStep([], 1.0, True)

        def close(self) -> None:
            released.wait(60)

    released = Event()
    alarm = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 30)

    def write() -> list[Trajectory]:
        policy = Scripted(BYTES, ["hang"], ["go"])
        both = [
            Episode(Hanging(), QUESTION, PlainTurns(BYTES), name=name, seconds=0.2)
            for name in "ab"
        ]
        trajectories = write_episodes(both, policy)
        both[0].close()
        return trajectories

    try:
        if thread:
            with ThreadPoolExecutor(1) as pool:
                stuck, good = pool.submit(write).result(20)
        else:
            stuck, good = write()
            assert 20 < signal.getitimer(signal.ITIMER_REAL)[0] < 30  # another's alarm
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
        released.set()
    assert stuck.facts["ended"] == "its environment took longer than 0.2 s"
    assert stuck.turns[-1].reward is None and good.turns[-1].reward == 1.0

    class Slow(Environment):
        def reset(self, question: RewardQuestion) -> Any:
            sleep(60)

    with pytest.raises(
        WeftError, match=r"q: its environment took longer than 0\.1 s to"
    ):
        Episode(Slow(), QUESTION, PlainTurns(BYTES), name="q", seconds=0.1)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("go on", "returned str, which is no list of messages"),
        (None, "returned NoneType, which is no list"),
        ([{"content": "x"}], "returned a list with {'content': 'x'}, which is no"),
        (KeyError("sky"), "raised KeyError: 'sky'"),
    ],
)
def test_what_is_no_message_names_its_environment(given: Any, why: str) -> None:
    def say() -> Any:
        if isinstance(given, Exception):
            raise given
        return given

    class Begins(Environment):
        def reset(self, question: RewardQuestion) -> Any:
            return say()

    class Goes(Environment):
        def step(self, action: str) -> EnvironmentStep:
            return EnvironmentStep(say(), 1.0, False)

    with pytest.raises(WeftError) as error:
        Episode(Begins(), QUESTION, PlainTurns(BYTES), name="q")
    assert str(error.value).startswith(f"q: its environment Begins {why}")
    going = Episode(Goes(), QUESTION, PlainTurns(BYTES))
    (broken,) = write_episodes([going], Scripted(BYTES, ["a"]))
    assert broken.facts["ended"].startswith(f"its environment {why}")
    assert broken.turns[-1].reward is None


def test_hostile_actions_do_nothing(tmp_path: Path) -> None:
    """As plain texts, as arguments of a call, and as broken calls; nothing is executed or rewarded."""
    sentinel = tmp_path / "executed"
    environment = reward_task(Task(reward="calculator")).environment()
    assert environment is not None
    for text in hostile_answers(sentinel):
        for action in (text, call(text), f"<tool_call>{text}", f"<tool_call>{text}</tool_call>"):  # fmt: skip
            environment.reset(QUESTION)
            observation, reward, _ = environment.step(action)
            assert reward == 0
            assert all(len(message["content"]) <= 2000 for message in observation)
    assert not sentinel.exists()
