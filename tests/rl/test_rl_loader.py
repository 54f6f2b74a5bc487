"""Reinforcement learning as an ordinary run: rollout phases, their samples, resuming, and layouts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from weft import registry
from weft.api import start as train
from weft.checkpoint.model import open_model
from weft.checkpoint.store import open_checkpoint
from weft.data.chat.samples import read_samples
from weft.data.sample_ledger import VersionSpan
from weft.errors import UsageError, WeftError
from weft.layout.layout import Layout
from weft.observe.charts import charts
from weft.observe.run_metrics import RecordedRun, read_metrics
from weft.observe.run_page import write_report
from weft.recipe import ModelShape, Recipe, Source, Train, build_recipe
from weft.registry import register
from weft.rl import rl_setup
from weft.rl.answer_collection import AnswerCollection
from weft.rl.environment import Environment, EnvironmentStep
from weft.rl.generation_model import GenerationModel, usual_weights
from weft.rl.reward_task import RewardTask
from weft.rl.reward_workers import Scored
from weft.rl.rl_loader import RlLoader
from weft.rl.rollout import AnswerGroup, GroupRequest, RewardQuestion, WrittenAnswer
from weft.rl.scored_answers import ScoredGroup, check_scored, pass_at, phase_figures
from weft.rl.weight_moves import WeightsMoved
from weft.train.setup import prepare

TREE: dict[str, Any] = {
    "model": {"layers": 1, "embed": 32, "heads": 2, "ffn": 64, "tied": True},
    "data": {"seq_len": 16},
    "tasks": [{"reward": "addition", "digits": 1, "every": 0, "limit": 8}],
    "rl": {"method": "grpo", "group": 4, "tokens": 3, "start": {"steps": 2}},
    "train": {"steps": 6, "batch": 16, "threads": 1},
    "optimizer": {"lr": 1e-3, "warmup": 1, "schedule": "constant"},
    "validation": {"every": 0},
    "checkpoint": {"every": 0},
}


def recipe(**sections: Any) -> Recipe:
    tree = json.loads(json.dumps(TREE))
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values if isinstance(values, dict) else values
    return build_recipe(tree)


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [r for line in lines if (r := json.loads(line))["kind"] == kind]


def parameters(outcome: Any) -> dict[str, torch.Tensor]:
    opened = open_model(str(outcome.checkpoint), "cpu", print)
    return {name: p.detach().clone() for name, p in opened.model.named_parameters()}


@pytest.fixture
def letters(tmp_path: Path) -> dict[str, Any]:
    """A reward that answers of an untrained model get in part: the share of small bytes."""
    file, prompts = tmp_path / "reward.py", tmp_path / "prompts.jsonl"
    file.write_text(
        "def letters(answer, question):\n    return sum(c.isascii() for c in answer) / 3\n"
    )
    prompts.write_text(
        "".join(
            json.dumps({"prompt": f"say {i}", "answer": f"{i}"}) + "\n"
            for i in range(64)
        )
    )
    return {
        "reward": f"{file}:letters",
        "path": str(prompts),
        "name": "letters",
        "limit": 4,
    }


def test_a_run_learns_from_answers_that_it_writes(tmp_path: Path) -> None:
    run = train(recipe(rl={"keep": 2}), out=tmp_path / "run").run
    phases = records(run, "rollout")
    assert [r["phase"] for r in phases] == [0, 1, 2, 3]
    kept = sorted(path.name for path in (run / "answers").iterdir())
    assert kept == ["000002.jsonl", "000003.jsonl"]
    lines = (run / "answers" / kept[1]).read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    assert len(answers) == 16
    assert sum(a["reward"] for a in answers) / 16 == pytest.approx(phases[3]["reward"])
    versions = {tuple(map(tuple, a["versions"])) for a in answers}
    assert versions == {((0, phases[3]["step"]),)}
    talks = read_samples(
        Source(kind="chat", path=str(run / "answers"), on_error="skip")
    )
    said = [[m["role"] for m in talk.messages] for _, talk in talks]
    assert 16 < len(said) <= 32  # those that are not empty
    assert all(roles == ["user", "assistant"] for roles in said)
    assert all(r["lags"] == {"0": 16} for r in phases)
    assert all(0 <= r["pass@1"] <= r["pass@all"] <= 1 for r in phases)
    (shown, *_) = records(run, "answers")
    assert len(shown["groups"][0]["answers"]) == 4
    assert {r["step"] for r in records(run, "task.addition")} == {0, 6}
    policy = records(run, "policy")
    assert len(policy) == 3 and all(r["entropy"] > 0 for r in policy)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "change",
    [
        {"loss": {"kl": "k3", "kl_weight": 0.1}},
        pytest.param({"method": "ppo"}, marks=pytest.mark.slow),
    ],
    ids=["grpo", "ppo"],
)
def test_a_resumed_run_is_the_same_to_the_last_bit(
    tmp_path: Path, letters: dict[str, Any], change: dict[str, Any]
) -> None:
    rl = {"rl": TREE["rl"] | change, "tasks": [letters]}
    whole = train(recipe(**rl), out=tmp_path / "whole")
    train(recipe(**rl, train={"steps": 4}), out=tmp_path / "half")
    resumed = train(recipe(**rl), resume=str(tmp_path / "half"))
    a, b = parameters(whole), parameters(resumed)
    assert all(torch.equal(a[name], b[name]) for name in a)
    # which it would not be if the reference were not kept
    policy = records(whole.run, "policy")
    assert any(r["kl"] > 0 for r in policy)
    # a critic stays with the run, and whoever opens the model does without
    critic = "model.value_head" in open_checkpoint(str(whole.checkpoint)).tensors
    assert critic == (policy[-1]["value_loss"] > 0) == ("method" in change)
    assert "value_head" not in a


@pytest.mark.slow(2)
def test_a_curriculum_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Levels follow from the pass rates of all phases before, also of those before a checkpoint."""
    asked: list[tuple[int, list[int | None]]] = []
    whole_begin = RlLoader._begin

    def begin(self: RlLoader, phase: int) -> None:
        whole_begin(self, phase)
        chosen = self.job.phase_questions(phase, self.curricula.now)
        asked.append((phase, [question.level for question in chosen]))

    monkeypatch.setattr(RlLoader, "_begin", begin)
    task = {"reward": "addition", "digits": 3, "curriculum": True, "limit": 2}
    given = {"tasks": [task], "rl": {"start": {"steps": 0}, "batch": 8, "epochs": 1}}
    whole = train(recipe(**given, train={"steps": 6}), out=tmp_path / "whole")
    levels, asked[:] = dict(asked), []
    # in the middle of a phase of two updates
    half = train(recipe(**given, train={"steps": 3}), out=tmp_path / "half")
    assert half.progress.loader["0"]["phase"] == 1
    asked.clear()
    train(recipe(**given, train={"steps": 6}), resume=str(tmp_path / "half"))
    assert asked == [(1, levels[1]), (2, levels[2])]
    rates = [record["rates"] for record in records(whole.run, "levels")]
    assert len(rates) == 3 and len(rates[0]) == 3
    page = {
        each["title"]: each
        for each in charts([RecordedRun("run", read_metrics(whole.run))])
    }
    drawn = page["Curriculum"]["traces"]
    assert [trace["name"] for trace in drawn] == ["level 0", "level 1", "level 2"]
    for trace, own in zip(drawn, zip(*rates, strict=True), strict=True):
        assert trace["y"] == pytest.approx(own, rel=1e-4)
    with pytest.raises(UsageError, match=r"tasks.curriculum = true, and 'addition'"):
        train(recipe(tasks=[task | {"digits": 1}]), out=tmp_path / "single")
    with pytest.raises(UsageError, match=r"with rl.staleness = 1 the next questions"):
        ahead = given["rl"] | {"staleness": 1}
        writes = {"rollout": {"ranks": 1}}
        train(recipe(tasks=[task], rl=ahead, roles=writes), out=tmp_path / "ahead")


@pytest.mark.slow(3)
def test_answers_of_several_turns_are_learned_from(tmp_path: Path) -> None:
    """An environment says something after each turn, and its rewards are those of the run."""

    class Twice(Environment):
        """Lets the policy write twice, and rewards small bytes."""

        turns = 0

        def step(self, action: str) -> EnvironmentStep:
            self.turns += 1
            said = [{"role": "user", "content": "again"}]
            return EnvironmentStep(said, action.isascii() / 2, self.turns == 2)

    @register("task", "twice")
    class TwiceTask(RewardTask):
        """Asks something, twice."""

        def question(
            self, index: int, held_out: bool = False, level: int | None = None
        ) -> RewardQuestion:
            return RewardQuestion(f"{index % 10}", "a")

        def environment(self) -> Environment:
            return Twice()

    try:
        tree = {"tasks": [{"reward": "twice", "limit": 2}], "data": {"seq_len": 32}}
        # so that it ends its turns
        rl = {"start": {"steps": 30, "lr": 0.02}, "keep": 1}
        given = recipe(**tree, rl=rl, train={"steps": 32})
        run = train(given, out=tmp_path / "run").run
    finally:
        registry._REGISTERED.pop(("task", "twice"))
    phases = records(run, "rollout")
    # 5 bytes of the environment, and tokens before and behind
    assert len(phases) == 2 and all(r["length_most"] >= 7 for r in phases)
    assert all(r["unscored"] == 0 and 0.5 < r["reward"] <= 1 for r in phases)
    (policy,) = records(run, "policy")
    (shown, *_) = records(run, "answers")
    turns = shown["groups"][0]["answers"][0]["turns"]
    assert len(turns) == 2 and turns[0]["seen"] == "again"
    reward = shown["groups"][0]["answers"][0]["reward"]
    assert sum(turn["reward"] for turn in turns) == pytest.approx(reward)
    assert 'class="turn"' in write_report(run).read_text()
    ((_, talk), *_) = read_samples(
        Source(kind="chat", path=str(run / "answers"), on_error="skip")
    )
    assert [m["role"] for m in talk.messages][:3] == ["user", "assistant", "user"]
    # what the environment says is not learned; the record is of the phase before
    assert policy["tokens"] == 16 * (phases[0]["length"] - len("again"))


def test_the_best_checkpoint_answers_most_questions_right(
    tmp_path: Path, letters: dict[str, Any]
) -> None:
    given = recipe(
        tasks=[letters | {"every": 2}], validation={"every": 2, "keep_best": True}
    )
    outcome = train(given, out=tmp_path / "run")
    right = {r["step"]: r["accuracy"] for r in records(outcome.run, "task.letters")}
    best = outcome.best
    assert best.step in right and best.step > 0
    assert right[best.step] == max(share for step, share in right.items() if step)
    assert best.loss == pytest.approx(1 - right[best.step])


def test_several_updates_learn_from_one_phase(
    tmp_path: Path, letters: dict[str, Any]
) -> None:
    given = recipe(
        tasks=[letters],
        rl={"batch": 8, "epochs": 2, "start": {"steps": 0}},
        train={"steps": 8},
    )
    run = train(given, out=tmp_path / "run").run
    assert [r["step"] for r in records(run, "rollout")] == [0, 4]
    (first, *_) = records(run, "policy")
    # later updates have moved away from the weights that wrote
    assert first["ratio"] != 1.0


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"train": {"batch": 18}}, "no whole groups"),
        ({"rl": {"batch": 3}}, "which 1 epochs do not divide"),
        ({"rl": {"group": 1}}, "use at least 2"),
        ({"rl": {"loss": {"kl_weight": 0.1}}}, "has none; set rl.loss.kl"),
        ({"rl": {"loss": {"correction": {"high": 2}}}}, "low and high limit a weight"),
        (
            {"rl": {"loss": {"correction": {"weight": "token", "low": 3, "high": 2}}}},
            "low = 3 is above high = 2",
        ),
        (
            {"roles": {"rollout": {"weights": "bfloat16"}}, "model": {"experts": 4}},
            "weights in bfloat16 are for dense models",
        ),
        (
            {"roles": {"rollout": {"weights": "bfloat16", "invariant": True}}},
            "invariant needs a model that is whole",
        ),
        ({"tasks": []}, "no .*tasks.* has one"),
        ({"data": {"path": "talks.jsonl"}}, "reads none: it learns from answers"),
        (
            {
                "loss": {"kind": "dpo"},
                "data": {"kind": "preference", "path": "p.jsonl"},
            },
            "the loss of .rl. is rl.method",
        ),
        ({"rl": {"method": "grop"}}, "did you mean 'grpo'"),
        ({"rl": {"tokens": 30}}, "more than data.seq_len = 16"),
        ({"layout": {"island": 2}}, "leave layout.island out"),
        ({"model": {"dropout": 0.1}}, r"model.dropout = 0.1 draws by the samples"),
        (
            {"adapter": {"rank": 2, "dropout": 0.1}},
            r"adapter.dropout = 0.1 draws by the samples",
        ),
        ({"model": {"small_ffn": 4}}, r"\[rl\] learns from answers, for which nothing"),
        ({"data": {"tokenizer": "train:300"}}, "reads none"),
    ],
)
def test_what_does_not_go_together_is_refused(
    sections: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=why):
        train(recipe(**sections), out=tmp_path / "run")


def test_a_prompt_that_is_too_long_is_named_before_the_run_starts(
    tmp_path: Path, letters: dict[str, Any]
) -> None:
    """Not when it is asked, which may be thousands of steps later."""
    with Path(letters["path"]).open("a") as file:
        for long in (40, 90):
            file.write(json.dumps({"prompt": "x" * long, "answer": "1"}) + "\n")
    with pytest.raises(
        UsageError, match=r"'x{60}' has 90 tokens.*= 16 \(so .* 1 more\)"
    ):
        prepare(recipe(tasks=[letters]))


def test_answers_are_written_with_weights_in_bfloat16_where_that_is_asked(
    tmp_path: Path, letters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampler and trainer then differ by more than roundings of float32, which the run reports."""
    types = list[torch.dtype]()

    def refresh(self: GenerationModel, version: int) -> WeightsMoved:
        moved = refreshed(self, version)
        types.append(self.model.output.dtype)
        return moved

    refreshed = GenerationModel.refresh
    monkeypatch.setattr(GenerationModel, "refresh", refresh)
    gaps = {}
    for weights in ("", "bfloat16"):
        rollout = {"roles": {"rollout": {"weights": weights}}}
        run = train(
            recipe(**rollout, tasks=[letters], train={"steps": 4}),
            out=tmp_path / f"run-{weights}",
        ).run
        gaps[types[-1]] = records(run, "policy")[-1]["mismatch"]
    assert gaps[torch.float32] < 1e-5 < gaps[torch.bfloat16] < 0.1


def test_bfloat16_is_usual_where_gpus_train_dense_models_in_it() -> None:
    shape, alone = ModelShape(vocab=8, layers=1, embed=8, heads=1, ffn=8), Layout()
    narrow, wide = Train(dtype="bfloat16"), Train()
    two = Layout.parse("tp=2")
    mixture = shape.model_copy(update={"experts": 2})
    summed = shape.model_copy(update={"mixer": "retention"})
    for own, layout, section, gpu, said in [
        (summed, alone, narrow, True, "float"),
        (shape, alone, narrow, True, "bfloat16"),
        (shape, alone, narrow, False, "float"),
        (shape, alone, wide, True, "float"),
        (shape, two, narrow, True, "float"),
        (mixture, alone, narrow, True, "float"),
    ]:
        assert usual_weights(own, layout, section, gpu) == said


def test_what_a_pretrained_model_brings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = rl_setup.completed_job

    def begun(*asked: Any) -> Any:
        job = complete(*asked)
        return replace(job, shape=job.shape.model_copy(update={"small_ffn": 4}))

    monkeypatch.setattr(rl_setup, "completed_job", begun)
    with pytest.raises(UsageError, match=r"model.small_ffn = 4 draws by the samples"):
        train(recipe(), out=tmp_path / "run")


def test_questions_are_the_same_when_an_address_is_signed_anew() -> None:
    task = {"reward": "reward-model", "path": "q.jsonl", "every": 0}
    seen = [
        rl_setup._corpus(recipe(tasks=[task | {"model": f"http://{where}"}]), None).fingerprint
        for where in ("h/v1?key=1", "me:word@h/v1?key=2", "other/v1")
    ]  # fmt: skip
    assert seen[0] == seen[1] != seen[2]


def scored(rewards: list[float], lags: tuple[int, ...] = (0,)) -> ScoredGroup:
    request = GroupRequest(0, RewardQuestion("?"), (1,), len(rewards), 0)
    answers = tuple(
        WrittenAnswer(
            (1, 2), (-0.1, -0.2), (VersionSpan(0, 5 - lags[i % len(lags)]),), "stop"
        )
        for i in range(len(rewards))
    )
    whys = tuple("it raised" if math.isnan(reward) else "" for reward in rewards)
    return ScoredGroup(AnswerGroup(request, answers), tuple(rewards), whys)


def test_answers_without_a_reward_are_named_and_end_the_run_if_there_are_too_many() -> (
    None
):
    nan = float("nan")
    assert check_scored([scored([1, 0, 1, 0])], 0.2) == ""
    assert "1 of 4 answers have no reward" in check_scored(
        [scored([1, 0, nan, 0])], 0.3
    )
    with pytest.raises(
        WeftError, match=r"it raised; that is more than rl.most_unscored = 0.2"
    ):
        check_scored([scored([1, nan, nan, 0])], 0.2)
    with pytest.raises(WeftError):
        check_scored([scored([nan, nan])], 1.0)


def test_scoring_ends_as_soon_as_too_many_answers_have_no_reward() -> None:
    """A reward that hangs for ten seconds with every answer is named after some, not after all."""
    judged = []

    def scores(group: AnswerGroup, workers: None) -> list[Scored]:
        judged.append(group)
        return [Scored(None, "took longer than 10 s")] * 2

    mesh, source = SimpleNamespace(step_group=None), object()
    rank: Any = SimpleNamespace(
        local=None, writes_all=True, mesh=mesh, rewards=[None], _scores=scores, _groups=lambda *_: range(8),
        job=SimpleNamespace(answers=16, rl=SimpleNamespace(most_unscored=0.25)),
    )  # fmt: skip
    asked: Any = [SimpleNamespace(task=0, answers=2)] * 8
    with pytest.raises(WeftError, match=r"6 of 16 answers have no .* longer than 10 s"):
        AnswerCollection.written(rank, cast("Any", source), asked, asked)
    assert len(judged) == 3


def test_questions_are_drawn_again_only_where_they_are_asked() -> None:
    """One that nobody asks may be one that ends the run, and takes time."""
    poor, taught = scored([0.0, 0.0]), scored([0.0, 1.0])
    rounds = iter([[poor, taught, poor], [poor, taught], [taught]])
    asked, kept, spare = list[Any](), list[Any](), iter(range(10, 20))

    def collected(questions: list[int], **more: Any) -> list[ScoredGroup]:
        asked.append(questions)
        return next(rounds)

    loader: Any = SimpleNamespace(
        job=SimpleNamespace(
            phase_questions=lambda *_: [0, 1, 2], spare_questions=lambda *_: spare
        ),
        curricula=SimpleNamespace(now={}), rl=SimpleNamespace(redraw=3),
        products=SimpleNamespace(keep=lambda requests: kept.append(requests()), end_phase=kept.append),
        collection=SimpleNamespace(requests=list), _collected=collected, _ask_ahead=lambda phase: False,
    )  # fmt: skip
    loader._answered = partial(RlLoader._answered, loader)
    answered, groups = RlLoader._kept_groups(loader, 0)
    assert kept == [[0, 1, 2], True] and asked == [[0, 1, 2], [10, 11], [12]]
    assert next(spare) == 13 and groups == [taught] * 3 and len(answered) == 6


def test_pass_at_k_counts_as_enumeration_does() -> None:
    from itertools import combinations

    right = [1, 0, 0, 1, 0]
    for k in range(1, 6):
        sets = [*combinations(right, k)]
        assert pass_at(k, 2, 5) == pytest.approx(sum(map(any, sets)) / len(sets))


def test_figures_of_a_phase() -> None:
    figures = phase_figures([scored([1, 0], (0, 2)), scored([1, 1], (1,))], 5)
    assert (
        figures["reward"] == 0.75
        and figures["pass@1"] == 0.75
        and figures["pass@all"] == 1
    )
    assert figures["teaching"] == 0.5 and figures["lags"] == {"0": 1, "1": 2, "2": 1}
