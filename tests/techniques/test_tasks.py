"""Weft's own tasks of rewards: right answers, wrong ones, and five hundred hostile ones."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from weft.errors import UsageError
from weft.recipe import Task
from weft.registry import names
from weft.rl.build_task import reward_task
from weft.rl.reward_task import RewardTask
from weft.rl.rollout import RewardQuestion
from weft.rl.schema_matching import check_schema, matches


def task(reward: str, **settings: Any) -> RewardTask:
    return reward_task(Task(reward=reward, **settings))


@pytest.mark.parametrize("name", ["addition", "countdown", "sorting", "length"])
def test_right_answers_and_levels(name: str) -> None:
    asked = task(name)
    for index in range(60):
        question = asked.question(index)
        assert asked.score(question, f"{question.answer}\n") == 1, question
        assert asked.score(question, question.answer + "1") == 0
        assert asked.score(question, "") == 0
    longest = 0
    for level in range(asked.levels):
        questions = [asked.question(i, level=level) for i in range(40)]
        lengths = [len(str(q.prompt)) + len(q.answer) for q in questions]
        assert sum(lengths) > longest
        longest = sum(lengths)
    hardest = [asked.question(i, level=asked.levels - 1) for i in range(5)]
    assert hardest == [asked.question(i) for i in range(5)]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("3*5+7", 1),
        ("(3*5)+7", 1),
        ("7+5*3", 1),
        ("3*5+7+0.0", 0),
        ("3*5+7+0", 0),  # a number that is not given
        ("22", 0),
        ("15+7", 0),
        ("3*5+7-3+3", 0),  # one used twice
        ("3*5--7", 0),  # no sign before a number
        ("3**5+7", 0),
        ("5//3*7", 0),
        ("3*5+7 ", 1),
        ("3*5+7=22", 0),
    ],
)
def test_countdown(answer: str, reward: float) -> None:
    question = RewardQuestion("", facts={"numbers": [3, 5, 7], "target": 22})
    assert task("countdown").score(question, answer) == reward


def test_countdown_divides_exactly() -> None:
    """As fractions, so that 1/3*3 is 1."""
    question = RewardQuestion("", facts={"numbers": [1, 3, 3], "target": 1})
    assert task("countdown").score(question, "1/3*3") == 1
    assert task("countdown").score(question, "1/(3-3)") == 0


def test_words_around_questions_and_answers() -> None:
    sums = task("addition", ask="Add: {question} Be brief.", tag="answer")
    question = sums.question(0)
    plain = task("addition").question(0)
    assert question.prompt == f"Add: {plain.prompt} Be brief."
    right = plain.answer
    for text, reward in (
        (f"<answer> {right}</answer>", 1),
        (f"<answer>0</answer> no, <answer>{right}</answer>.", 1),
        (right, 0),
        (f"<answer>{right}", 0),
        (f"{right}</answer>", 0),
    ):
        assert sums.reward(question, text) == reward
    with pytest.raises(UsageError, match=r"ask has no \{question\}"):
        task("addition", ask="Add")


def test_regex() -> None:
    form = task("regex", pattern=r"<b>.*</b>", path="-")
    question = RewardQuestion("?")
    assert form.score(question, " <b>a\nb</b>\n") == 1
    assert form.score(question, "x <b>a</b>") == 0
    with pytest.raises(UsageError, match="no regular expression"):
        task("regex", pattern="(")


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "pattern": "^[A-Z]"},
        "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 150},
        "tags": {
            "type": "array",
            "items": {"enum": ["a", "b", 1]},
            "maxItems": 3,
            "uniqueItems": True,
        },
        "other": {"anyOf": [{"$ref": "#/$defs/pair"}, {"type": ["null", "boolean"]}]},
    },
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {
        "pair": {
            "prefixItems": [{"const": 2}, {"multipleOf": 0.5}],
            "type": "array",
            "minItems": 2,
            "items": False,
        }
    },
}


def test_json_answers() -> None:
    form = task("json-schema", json_schema=SCHEMA)
    question = RewardQuestion("?")
    assert form.score(question, '{"name": "Ada", "age": 36.0, "tags": ["a", 1]}') == 1
    for wrong in (
        '{"name": "ada"}',
        '{"name": "Ada", "age": 150}',
        '{"name": "Ada", "tags": [1, 1.0]}',
        '{"name": "Ada", "tags": [true]}',
        '{"name": "Ada", "more": 1}',
        '{"name": "Ada", "age": NaN}',
        '{"name": "Ada"',
        "[]",
    ):
        assert form.score(question, wrong) == 0, wrong
    of_its_own = RewardQuestion("?", facts={"schema": '{"type": "integer"}'})
    assert form.score(of_its_own, "3") == 1
    with pytest.raises(UsageError, match=r"schema.properties.a: .* 'minimun'"):
        task("json-schema", json_schema={"properties": {"a": {"minimun": 1}}})


def value_of(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(8 if depth < 2 else 6)
    if kind == 7:
        keys = draw.sample(["name", "age", "tags", "other", "more"], draw.randrange(4))
        return {key: value_of(draw, depth + 1) for key in keys}
    if kind == 6:
        return [value_of(draw, depth + 1) for _ in range(draw.randrange(4))]
    return draw.choice([None, True, False, 0, 1, 1.0, 2, 2.5, 149, 150, -1, "a", "b", "Ada", ""])  # fmt: skip


def test_json_schemas_mean_what_the_reference_library_says() -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator(SCHEMA)
    draw, agreed = random.Random(0), 0
    parts: list[Any] = [SCHEMA["properties"], SCHEMA["$defs"]]
    schemas = [SCHEMA, *(schema for part in parts for schema in part.values())]
    for schema in schemas:
        check_schema(schema)
        reference = validator.evolve(schema={**schema, "$defs": SCHEMA["$defs"]})
        for _ in range(400):
            value = value_of(draw)
            expected = reference.is_valid(value)
            assert matches(value, schema, SCHEMA) == expected, (schema, value)
            agreed += expected
    assert agreed > 150


def hostile_answers(sentinel: Path) -> list[str]:
    """Five hundred texts that a careless scorer would execute, or take hours over."""
    touch = f"open({str(sentinel)!r}, 'w').write('x')"
    system = f"__import__('os').system('touch {sentinel}')"
    code = [touch, system, f"exec({touch!r})", f"eval({system!r})", f"(lambda: {touch})()", f"[{touch} for _ in '1']",
            f"{{{touch}}}", f"f'{{{touch}}}'", f"1 if {touch} else 2", f"__builtins__['exec']({touch!r})",
            f"().__class__.__base__.__subclasses__() or {touch}", f"$(touch {sentinel})", f"`touch {sentinel}`",
            f"; touch {sentinel}", f"!!python/object/apply:os.system ['touch {sentinel}']",
            f"cos\nsystem\n(S'touch {sentinel}'\ntR.", "while True: pass", "[0]*10**12", "import os\nos._exit(0)",
            "raise SystemExit", "(yield)", "await x", "x := 3", "quit()"]  # fmt: skip
    numbers = ["9**9**9", "9**9**9**9", "-9**9**9", "1e999", "1E+99999999", "0x" + "f" * 5000, "9" * 100_000,
               "1/0", "0/0", "1<<10**9", "nan", "inf", "-inf", "NaN", "Infinity", "1_0", "1__0", "0b1", "1j",
               "\u0663*\u0665+\u0667",
               "\u0969", "\uff11\uff12", "\u00b2", "\u00bd", "\U0001d7d9\U0001d7da", 
               "1,2", "1.5.2", "--1", "+-+-1", "1e1e1", "factorial(10**6)",
               "10**10**10%7", "999999999999*" * 3000 + "9", "1/3" * 2000]  # fmt: skip
    nested = [left * depth + middle + right * depth
              for depth in (50, 300, 5000, 60_000)
              for left, middle, right in (("(", "1", ")"), ("[", "", "]"), ('{"a":', "1", "}"), ("-", "1", ""),
                                          ("not ", "1", ""), ("1+(", "1", ")"), ("<a>", "", "</a>"),
                                          ("((", "", ""))]  # fmt: skip
    long = [text * count for count in (1000, 200_000)
            for text in ("a", " ", "\n", "\0", "()", "a1", "ab ", "\\", '"', "é", "\u202e", "😀",
                         "a!" * 3)]  # fmt: skip
    formats = ["%s" * 50, "%n", "{0.__class__}", "{}" * 50, "%1000000000d", "{:>1000000000}", "${jndi:ldap://x}",
               "{{7*7}}", "<!ENTITY a '&b;&b;'>", "\x1b]0;x\x07", "\ud800",
               "\ufeff1", "\u200b1", "1\u0000", "\r\r\r"]  # fmt: skip
    kinds = [code, numbers, nested, long, formats]
    every = [text for kind in kinds for text in kind]
    draw = random.Random(1)
    small = [*code, *numbers[:5], *formats]
    while len(every) < 500:
        every.append(draw.choice(["\n", "+", "*", " ", "</answer>"]).join(draw.sample(small, 3)))  # fmt: skip
    return every


#: Every task of Weft's own that judges an answer itself, with settings, and the facts of a question.
JUDGES: dict[str, tuple[dict[str, Any], RewardQuestion]] = {
    "addition": ({}, RewardQuestion("12+34=", "46")),
    "countdown": ({}, RewardQuestion("", "3*5+7", {"numbers": [3, 5, 7], "target": 22})),
    "sorting": ({}, RewardQuestion("dbca>", "abcd")),
    "length": ({}, RewardQuestion("a*7=", "aaaaaaa")),
    "dataset exact": ({}, RewardQuestion("?", "46")),
    "dataset contains": ({"scorer": "contains"}, RewardQuestion("?", "forty-six")),
    "dataset number": ({"scorer": "number"}, RewardQuestion("?", "46")),
    "dataset regex": ({"scorer": "regex"}, RewardQuestion("?", r"\w* ?46")),
    "regex": ({"pattern": r"<b>(\d|,)+</b>"}, RewardQuestion("?")),
    "json-schema": ({"json_schema": SCHEMA}, RewardQuestion("?")),
    "calculator": ({}, RewardQuestion("12*34+5=", "413")),
    "combined": (
        {"parts": [{"reward": "countdown"}, {"reward": "regex", "pattern": r"[3-7+*]+"}], "how": "product"},
        RewardQuestion("", "3*5+7", {"numbers": [3, 5, 7], "target": 22}),
    ),
}  # fmt: skip


def test_hostile_answers_are_given_to_every_task() -> None:
    """But to a reward model, which reads an answer as tokens and nothing else; code has a test of its own."""
    judged = {name.split()[0] for name in JUDGES}
    assert judged | {"code", "reward-model"} == {*names("task")}


@pytest.mark.parametrize("name", JUDGES)
def test_hostile_answers_get_nothing(name: str, tmp_path: Path) -> None:
    """Five hundred for each: none is executed, none takes long, none is rewarded."""
    settings, question = JUDGES[name]
    judge = task(name.split()[0], **settings)
    sentinel = tmp_path / "executed"
    answers = hostile_answers(sentinel)
    assert len(answers) == 500
    start = time.process_time()
    rewards = [judge.score(question, answer) for answer in answers]
    assert set(rewards) == {0.0}
    assert not sentinel.exists()
    assert time.process_time() - start < 5
    json.dumps(rewards)


def test_combined_rewards() -> None:
    parts: list[dict[str, Any]] = [
        {"reward": "addition", "tag": "answer", "digits": 2, "weight": 3},
        {"reward": "regex", "pattern": r"\w+: <answer>.*</answer>", "weight": 1},
    ]
    for how, scale, rewards in (("sum", 4, (1, 0.75, 0.25)), ("product", 1, (1, 0, 0))):
        both = task("combined", parts=parts, how=how, scale=scale)
        question = both.question(3)
        assert question == task("addition", digits=2).question(3)
        right = f"<answer>{question.answer}</answer>"
        texts = (f"Sum: {right}", right, "Sum: <answer></answer>")
        assert tuple(both.reward(question, text) for text in texts) == rewards
    for wrong, why in (
        ([{"reward": "adition"}], "did you mean 'addition'"),
        ([{"reward": "addition", "digts": 1}], "unknown key 'digts'"),
        ([{"path": "questions.jsonl"}], "each part has a reward"),
        ([{"reward": "addition", "weight": "much"}], "weight = 'much' is no number"),
        ([], "has no parts"),
    ):
        with pytest.raises(UsageError, match=why):
            task("combined", parts=wrong)
