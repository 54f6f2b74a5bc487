"""A search finds the known best of a planted problem, its language can do nothing but calculate, and finds are used."""

import math
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.cli.search import search_command
from weft.errors import UsageError
from weft.registry import find, names
from weft.search.evolution import drawn_expression, joined, mutated
from weft.search.judged_policy import JudgedPolicy
from weft.search.model_proposals import ModelProposals
from weft.search.policy_language import MOST_NODES, parse_policy, run_of
from weft.search.policy_search import (
    SearchSize,
    check_plugin_path,
    expression_diff,
    feature_values,
    plugin_text,
    search_policy,
    write_plugin,
)

FEATURES = ("a", "b", "c")


class Planted(JudgedPolicy):
    """Jobs on one machine: their weighted mean end is least in the order of time over weight (Smith 1956)."""

    features: ClassVar[dict[str, str]] = {
        "time": "time",
        "weight": "weight",
        "noise": "nothing",
    }
    baselines: ClassVar[dict[str, str]] = {"first": "noise", "short": "time"}
    greedy, registered, base = "first", "dispatch-policy", "ExpressionDispatch"
    usage = "{module} {name}"

    def workload(self, seed: int, size: int) -> list[tuple[float, float, float]]:
        draw = Random(seed)
        return [
            (draw.uniform(1, 20), draw.uniform(1, 9), draw.random())
            for _ in range(size)
        ]

    def cost(self, formula: Callable[[Sequence[float]], float], workload: Any) -> float:
        now = total = 0.0
        for job in sorted(workload, key=formula):
            now += job[0]
            total += now * job[1]
        return total / len(workload)


def test_the_known_best_of_a_planted_problem_is_found() -> None:
    policy = Planted()
    best = search_policy(
        policy, SearchSize(generations=15, population=40, workloads=2, requests=30)
    )
    smith = parse_policy("time / weight", [*policy.features])
    formula = run_of(smith, [*policy.features])
    others = [policy.cost(formula, policy.workload(10_000 + i, 30)) for i in range(2)]
    assert best.held_out["find"] <= sum(others) / 2 * 1.001
    assert best.gain("short") > 0.05
    assert "+" in expression_diff(policy, best)


@given(st.integers(0, 10**6), st.lists(st.floats(-1e30, 1e30), min_size=3, max_size=3))
@settings(deadline=None, max_examples=60)
def test_every_expression_is_a_number_and_reads_back(
    seed: int, values: list[float]
) -> None:
    draw, values_of = Random(seed), dict.fromkeys(FEATURES, values)
    first, second = (drawn_expression(values_of, 3, draw) for _ in range(2))
    for each in (first, mutated(first, values_of, draw), joined(first, second, draw)):
        again = parse_policy(str(each), FEATURES)
        assert math.isfinite(run_of(each, FEATURES)(values))
        assert run_of(again, FEATURES)(values) == run_of(each, FEATURES)(values)
        assert str(again) == str(parse_policy(str(again), FEATURES))


def test_the_search_begins_with_values_that_features_take() -> None:
    policy = Planted()
    values = feature_values(policy, policy.workload(0, 300))
    assert {name: len(each) for name, each in values.items()} == dict.fromkeys(
        ("time", "weight", "noise"), 100
    )
    assert 1 <= min(values["time"]) < 3 and 18 < max(values["time"]) <= 20
    assert max(values["noise"]) < 1


def test_a_function_is_read_with_its_variables_and_branches() -> None:
    source = """
def policy(a, b, c):
    \"\"\"What a model writes.\"\"\"
    d = a + 1
    if a > b and not c:
        d *= 2
    elif b >= 5:
        return min(a, b, c)
    return d / (b - b)
"""
    run = run_of(parse_policy(source, FEATURES), FEATURES)

    def policy(a: float, b: float, c: float) -> float:
        d = a + 1
        if a > b and not c:
            d *= 2
        elif b >= 5:
            return min(a, b, c)
        return d  # a division by almost nothing

    for values in ((3, 1, 0), (3, 1, 1), (2, 7, 1), (0, 0, 0)):
        assert run(values) == policy(*values)


HOSTILE = [
    "__import__('os').system('touch /tmp/weft_was_here')", "open('/etc/passwd').read()", "exec('1')", "eval('1')",
    "().__class__.__bases__[0].__subclasses__()", "a.__class__", "[x for x in range(9)]", "lambda: 1", "(yield a)",
    "a ** 9 ** 9 ** 9", "9 ** 9 ** 9", "a << 10 ** 9", "'x' * 10 ** 12", "a @ b", "f'{a}'", "globals()",
    "getattr(a, 'b')", "min(*a)", "max(a, key=print)", "abs()", "sqrt(a, b)", "math.system(a)", "os.system('x')",
    "import os", "while True: pass", "for i in a: pass", "def f(a):\n while 1: pass", "def f(a):\n return f(a)",
    "def f(a):\n import socket\n return a", "def f(a):\n global b\n return b", "def f(a):\n del a\n return 1",
    "def f(a):\n raise a", "def f(a):\n assert a\n return a", "@print\ndef f(a):\n return a",
    "def f(a):\n try:\n  return a\n except: return 1", "def f(a):\n with a: return 1", "class X: pass",
    "async def f(a): return a", "def f(a): pass", "def f(a):\n if a: return 1", "a := 1", "(a := 1)", "...", "None",
    "'text'", "b'x'", "1j", "a if", "((((", "\x00", "a" * 30_000, "(" * 900 + "a" + ")" * 900, "-" * 5000 + "a",
    "+".join(["a"] * 5000), "a;b", "a\nb", "not_a_feature", "a, b", "{a: b}", "{a}", "a[0]", "a[0:1]", "a is b",
    "a in b", "a < b < c", "~a", "+a", "a // b", "a % b", "a | b", "await a", "print(a)", "min(a)", "1" * 5000,
    "def f(a):\n" + "".join(f" if a < {i}:\n  a = a + {i}\n" for i in range(60)) + " return a",
    "def f(a):\n" + " a = a + a\n" * 60 + " return a", "def f(a):\n a = [1]\n return a",
    "def f(a):\n a.b = 1\n return a", "def f(a):\n nonlocal b\n return a", "def f(a):\n return",
    "def f(a):\n x: int = 1\n return x", "type(a)", "vars()", "dir()", "breakpoint()", "input()",
    "compile('1', '', 'eval')", "memoryview(a)", "__builtins__", "__name__", "exit()", "a.real",
]  # fmt: skip


def test_a_hundred_hostile_candidates_do_no_harm() -> None:
    """Each is refused in a line, or is a number after all."""
    from time import perf_counter

    candidates = [*HOSTILE, *(f"def f(a):\n return {bad}" for bad in HOSTILE[:20])]
    assert len(candidates) >= 100
    for source in candidates:
        begun = perf_counter()
        try:
            parsed = parse_policy(source, FEATURES)
        except UsageError as error:
            assert "\n" not in str(error) or "invalid" in str(error)
        else:
            assert parsed.size <= MOST_NODES
            assert math.isfinite(run_of(parsed, FEATURES)((1.0, 2.0, 3.0)))
        assert perf_counter() - begun < 5
    assert not Path("/tmp/weft_was_here").exists()


class Canned:
    """A server whose model says what it is told to."""

    url = "http://nobody"

    def __init__(self, *answers: str) -> None:
        self.answers, self.bodies = [*answers], list[Any]()

    def call(self, path: str, body: Any) -> Any:
        self.bodies.append(body)
        return {"choices": [{"message": {"content": self.answers.pop(0)}}]}


def test_proposals_of_a_model_take_part_and_others_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_network(*given: Any) -> None:
        raise AssertionError("a proposal reached the network")

    lines = list[str]()
    answer = "Sure:\n```python\ndef p(time, weight):\n    return time / weight\n```"
    client: Any = Canned(answer, "import os")
    propose = ModelProposals(Planted(), client, "m", 2, lines.append)
    monkeypatch.setattr(socket, "socket", no_network)
    size = SearchSize(generations=2, population=4, workloads=1, requests=20)
    best = search_policy(Planted(), size, propose=propose)
    assert str(best.expression) == "(time / weight)"
    assert (
        "1 of 2 answers of m are no policies; the first: a policy is one expression"
        in lines[0]
    )
    assert "noise: nothing" in client.bodies[0]["messages"][0]["content"]


def test_the_key_of_a_server_stands_in_no_list_of_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It comes from a file or the environment; an argument is seen by every user of the machine."""
    keys, file = list[str](), tmp_path / "key"
    file.write_text("of the file\n")
    monkeypatch.setenv("OPENAI_API_KEY", "of the environment")

    def client(server: str, key: str) -> None:
        keys.append(key)
        raise UsageError("no server")

    monkeypatch.setattr("weft.serve.api_client.ApiClient", client)
    for key_file in (file, None):
        with pytest.raises(UsageError, match="no server"):
            search_command("cluster-dispatch", server="http://h", api_key=key_file)
    assert keys == ["of the file", "of the environment"]
    with pytest.raises(UsageError, match="are about --server"):
        search_command("cluster-dispatch", api_key=file)


def test_baselines_are_what_they_are_called() -> None:
    """As expressions they cost what the policies of the same names cost."""
    from weft.cluster.dispatch_policy import dispatch_policy
    from weft.search.simulated_engines import mean_seconds, new_engines
    from weft.techniques.searches.cluster_dispatch import SPEEDS

    judged: Any = find("search", "cluster-dispatch").implementation()
    features, load = [*judged.features], judged.workload(1, 20)
    for name in ("load", "cached-prefix"):  # the mean work of "balanced" may be zero
        formula = run_of(parse_policy(judged.baselines[name], features), features)
        alike = mean_seconds(new_engines(SPEEDS), load, dispatch_policy(name))
        assert judged.cost(formula, load) == alike


def test_with_too_much_load_the_earliest_deadline_first_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It serves what is lost already. Deadlines do not say how long an answer will be, which would help it."""
    from weft.techniques.searches.prompt_order import ANSWERS, READING, WRITING

    monkeypatch.setattr("weft.techniques.searches.prompt_order.LOAD", 2.0)
    judged: Any = find("search", "prompt-order").implementation()
    features, load = [*judged.features], judged.workload(0, 60)
    usual = {WRITING * math.exp(mean + s**2 / 2) for mean, s in ANSWERS.values()}
    for each in load:
        seconds, reads = each.workflow.deadline - each.time, READING * len(each.prompt)
        factors = [seconds / (reads + writes) for writes in usual]
        assert any(1.2 <= factor <= 4.0 for factor in factors)
    cost = {
        name: judged.cost(run_of(parse_policy(text, features), features), load)
        for name, text in judged.baselines.items()
        if name != "exact-fill"
    }
    assert cost["urgency"] < cost["earliest-deadline"] > cost["shortest-first"]


def test_a_find_is_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.cluster.dispatch_policy import (
        DispatchRequest,
        EngineView,
        dispatch_policy,
    )
    from weft.plugins import load_plugins

    judged: Any = find("search", "cluster-dispatch").implementation()
    best = search_policy(judged, SearchSize(2, 4, 1, 12))
    out = tmp_path / "better_dispatch.py"
    check_plugin_path(out, judged.registered)
    write_plugin(out, plugin_text(judged, "cluster-dispatch", "better-dispatch", best))
    monkeypatch.chdir(tmp_path)
    load_plugins(["better_dispatch"])
    assert "better-dispatch" in names("dispatch-policy")
    engines = [EngineView(name, 10, 1.0, 1, 0, 16) for name in ("x", "y")]
    assert (
        dispatch_policy("better-dispatch")(engines, DispatchRequest(9, "", 0)) in "xy"
    )
    for wrong in (
        out,
        tmp_path / "no" / "a.py",
        tmp_path / "a b.py",
        tmp_path / "a",
        tmp_path / "urgency.py",
    ):
        with pytest.raises(UsageError, match="--out"):
            check_plugin_path(wrong, "policy")
