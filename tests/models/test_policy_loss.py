"""Policy losses: the same under every layout, packing and size of microbatches, and equal to plain PyTorch."""

from __future__ import annotations

import dataclasses
import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.cases import recipe, write_corpus
from weft.data.batch import IGNORE
from weft.data.loader import Loader
from weft.data.order import RowList
from weft.data.policy_rows import PolicySample, policy_rows
from weft.errors import UsageError, WeftError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.hooks import Hooks
from weft.models.policy_loss import PolicyObjective
from weft.prove.equality import Difference, compare_with_one_device, run_layout
from weft.prove.types import check_types
from weft.recipe import PolicyLoss, Recipe, Train, build_recipe
from weft.rl.log_probabilities import token_log_probabilities
from weft.train.setup import Job, build_for_training, prepare
from weft.train.step import accumulate

SLOW = pytest.mark.slow
ROOM = 23

#: Settings that together have every part of the loss.
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {
        "normaliser": "sequence",
        "kl": "k3",
        "kl_weight": 0.1,
        "correction": {"weight": "sequence", "high": 1.2, "low": 0.8, "action": "zero"},
    },
    "dapo": {"clip_high": 0.28, "entropy": 0.05, "dual_clip": 1.3},
    "gspo": {
        "ratio": "sequence",
        "clip_low": 0.01,
        "clip_high": 0.02,
        "correction": {"weight": "token", "high": 1.05},
    },
    "cispo": {"form": "cispo", "clip_low": 1.0, "kl": "k2", "kl_weight": 0.2},
    "sapo": {"form": "sapo", "normaliser": "sequence", "entropy": -0.1},
    "vespo": {"form": "vespo", "correction": {"weight": "token", "high": 1.2}},
    "rloo": {"ratio": "product", "normaliser": "constant", "constant": 9, "off_policy": 0.01},
    "ppo": {"advantage": "gae", "value_weight": 0.5, "value_clip": 0.3},
}  # fmt: skip


def samples(count: int = 11) -> list[PolicySample]:
    """Answers of very unequal length, one of two turns, with numbers near those of a model that knows nothing."""
    rng = np.random.default_rng(3)
    made = []
    for i in range(count):
        n = int(rng.integers(4, 17))
        learns = np.arange(n) >= rng.integers(1, n - 1)
        if i == 3:
            learns = np.arange(n) % 3 > 0
        near = -5.5 + 0.1 * rng.standard_normal((3, n))
        made.append(
            PolicySample(
                rng.integers(0, 257, n),
                learns,
                np.full(n, rng.standard_normal()),
                *(None if i == 5 else x for x in near[:1]),
                old=None if i == 6 else near[1],
                reference=near[2],
                returns=rng.standard_normal(n),
                values=0.4 * rng.standard_normal(n),
            )
        )
    return made


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("policy"))


def prepared(values: Recipe, critic: str = "shared") -> Job:
    """A job whose model is a policy with a value head, or a critic with a trunk of its own."""
    job = prepare(values)
    shared = critic == "shared"
    change = {"value_head": True} if shared else {"output": "score", "tied": False}
    return dataclasses.replace(job, shape=job.shape.model_copy(update=change))


def step(settings: PolicyLoss, values: Any, room: int, rows: int) -> dict[str, Any]:
    """Loss, gradients and figures of one step on one device, in passes of ``rows`` rows with room for ``room``."""
    mesh, job = Mesh.single(torch.device("cpu")), prepared(values)
    objective = PolicyObjective(settings)
    with mock.patch("weft.train.setup.hooks_of", lambda *_: Hooks(objective=objective)):
        model, state = build_for_training(job.shape, mesh, values)
    listed = policy_rows(samples(), room, settings)
    passes = -(-listed.total // rows)
    loader = Loader(listed, mesh.layout, 0, 0, rows * passes, rows, passes, room)
    loss = accumulate(model, state, loader.step(0) or [], mesh)
    grads = {name: grad.clone() for name, grad in state.gradients().items()}
    return {"loss": loss, **grads, **objective.figures.take(mesh)}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", VARIANTS)
def test_packing_and_microbatches_change_nothing(corpus: str, name: str) -> None:
    settings, values = PolicyLoss(**VARIANTS[name]), recipe(corpus)
    whole = step(settings, values, 256, 1)
    for room, rows in ((ROOM, 1), (16, 5)):
        again = step(settings, values, room, rows)
        for key, value in whole.items():
            torch.testing.assert_close(
                torch.as_tensor(again[key]), torch.as_tensor(value), rtol=1e-10, atol=1e-14, msg=key
            )  # fmt: skip
    assert whole["policy.tokens"] == sum(s.learns.sum() for s in samples())
    assert whole["policy.mismatch"] > 0
    assert 0 < whole["policy.clipped_low"] + whole["policy.clipped_high"] < 1
    head = whole["value_head"].norm()
    assert (head > 0) == (whole["policy.value_loss"] > 0) == (name == "ppo")


def difference(
    values: dict[str, Any], loss: dict[str, Any], critic: str
) -> Difference | None:
    """On every rank: the layout; on rank 0 what differs from one device."""
    settings = PolicyLoss(**loss)
    built = build_recipe(values)
    mesh, job = Mesh.create(built.layout, "cpu"), prepare(built)
    if settings.needs_values:
        job = prepared(built, critic)
    rows = policy_rows(samples(), ROOM, settings)
    rows = RowList(rows.rows * 3)
    corpus = dataclasses.replace(job.corpus, train=rows)
    job = dataclasses.replace(job, corpus=corpus)
    hooks = Hooks(objective=PolicyObjective(settings, temperature=0.8))
    with mock.patch("weft.train.setup.hooks_of", lambda *_: hooks):
        return compare_with_one_device(run_layout(job, mesh, steps=3), job, mesh)


CASES: list[Any] = [
    ({"dp": 2}, "grpo"),
    ({"shard": 2}, "rloo"),
    ({"tp": 2}, "dapo"),
    ({"cp": 2, "context": "zigzag"}, "gspo"),
    ({"pp": 2}, "cispo"),
    ({"pp": 2, "vocab_barriers": 1}, "dapo"),
    ({"cp": 2, "tp": 2}, "ppo"),
    ({"pp": 2}, "ppo"),
    ({"tp": 2}, "ppo apart"),
    pytest.param({"pp": 2, "cp": 2}, "ppo apart", marks=SLOW),
    pytest.param({"shard": 2, "tp": 2}, "ppo", marks=SLOW),
    pytest.param({"pp": 2, "dp": 2, "schedule": "zb-h1"}, "ppo", marks=SLOW),
    ({"pp": 2, "tp": 2, "vocab_barriers": 2}, "sapo"),
    ({"cp": 2}, "vespo"),
    pytest.param({"cp": 2, "tp": 2}, "rloo", marks=SLOW),
    pytest.param({"cp": 2, "shard": 2}, "grpo", marks=SLOW),
    pytest.param({"pp": 2, "cp": 2, "vocab_barriers": 1}, "gspo", marks=SLOW),
    pytest.param({"pp": 2, "vocab_barriers": 2}, "dapo", marks=SLOW),
    pytest.param({"pp": 2, "tp": 2, "vocab_barriers": 1}, "sapo", marks=SLOW),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layout", "name"), CASES, ids=str)
def test_equal_to_one_device(
    pool: Any, corpus: str, layout: dict[str, Any], name: str
) -> None:
    values = recipe(corpus, data__seq_len=ROOM).model_dump(mode="json")
    values |= {"layout": layout}
    name, _, critic = name.partition(" ")
    world = Layout(**layout).world
    found = pool.run(world, difference, values, VARIANTS[name], critic or "shared")[0]
    assert found.ok, found


def recorded(values: dict[str, Any], temperature: float) -> list[np.ndarray]:
    """Log-probabilities of the samples' tokens, as this rank knows them."""
    built = build_recipe(values)
    mesh, job = Mesh.create(built.layout, "cpu"), prepare(built)
    model, state = build_for_training(job.shape, mesh, built)
    texts = [(s.ids, s.learns) for s in samples()]
    return token_log_probabilities(
        model, state, mesh, texts, rows=2, passes=2, room=ROOM, temperature=temperature
    )


@pytest.mark.parametrize(
    "layout", [{"cp": 2, "tp": 2}, {"pp": 2, "dp": 2, "vocab_barriers": 1}], ids=str
)
def test_log_probabilities_of_every_layout_are_plain_pytorchs(
    pool: Any, corpus: str, layout: dict[str, Any]
) -> None:
    built = recipe(corpus, data__seq_len=ROOM)
    values = built.model_dump(mode="json")
    mesh, job = Mesh.single(torch.device("cpu")), prepare(built)
    model, _ = build_for_training(job.shape, mesh, built)
    wanted = []
    for sample in samples():
        ids = torch.from_numpy(sample.ids)[None]
        edges = torch.tensor([0, ids.shape[1]], dtype=torch.int32)
        logits = model(ids, torch.arange(ids.shape[1])[None], edges)[0] / 0.7
        scores = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        scores = torch.where(torch.from_numpy(sample.learns[1:]), scores, 0)
        wanted.append(np.append(0, scores.detach().numpy()))
    alone = recorded(values, 0.7)
    spread = pool.run(Layout(**layout).world, recorded, values | {"layout": layout}, 0.7)  # fmt: skip
    for found in (alone, *spread):
        assert len(found) == len(wanted)
        for mine, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)


def test_what_a_loss_needs_and_a_sample_lacks_is_named() -> None:
    (sample,) = samples(1)
    bare = dataclasses.replace(sample, reference=None)
    with pytest.raises(WeftError, match="kl = 'k3'"):
        policy_rows([bare], ROOM, PolicyLoss(kl="k3", kl_weight=0.1))
    with pytest.raises(WeftError, match=r"rl\.loss\.constant"):
        policy_rows([sample], ROOM, PolicyLoss(normaliser="constant"))
    with pytest.raises(UsageError, match="a row has room for 3"):
        policy_rows([sample], 2, PolicyLoss())
    lost = dataclasses.replace(sample, advantage=sample.advantage * np.nan)
    with pytest.raises(WeftError, match="not finite"):
        policy_rows([lost], ROOM, PolicyLoss())


def test_a_policy_that_has_gone_far_has_a_finite_loss(corpus: str) -> None:
    far = [dataclasses.replace(s, old=np.full(len(s.ids), -900.0)) for s in samples()]
    mesh, job = Mesh.single(torch.device("cpu")), prepare(recipe(corpus))
    for ratio in ("token", "sequence", "product"):
        settings = PolicyLoss(ratio=ratio, kl="k3", kl_weight=0.1)
        hooks = Hooks(objective=PolicyObjective(settings))
        with mock.patch("weft.train.setup.hooks_of", lambda *_, h=hooks: h):
            model, state = build_for_training(job.shape, mesh, job.recipe)
        rows = policy_rows(far, 256, settings)
        loader = Loader(rows, mesh.layout, 0, 0, 1, 1, 1, 256)
        loss = accumulate(model, state, loader.step(0) or [], mesh)
        assert loss.isfinite()
        assert all(grad.isfinite().all() for grad in state.gradients().values())
    assert policy_rows([], ROOM, PolicyLoss()).total == 0


def test_rows_have_labels_where_the_policy_has_written() -> None:
    (row,) = policy_rows(samples(1), ROOM, PolicyLoss()).rows
    (sample,) = samples(1)
    assert row.rollout is not None
    np.testing.assert_array_equal(row.labels != IGNORE, sample.learns[1:])
    assert row.rollout.divisor.sum() == sample.learns.sum()


@pytest.mark.parametrize("name", ["gspo", "dapo", "ppo"])
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(shard=2, cp=2, tp=2)], ids=str)
def test_types(corpus: str, layout: Layout, name: str) -> None:
    policy = PolicyLoss(**VARIANTS[name])
    job = prepared if policy.needs_values else prepare
    shape = job(recipe(corpus)).shape
    assert check_types(shape, layout, Train(), policy=policy) is None


def test_a_wrong_sum_is_a_fault_of_types(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A critic's loss of each rank's own tokens that is not summed over ``tp`` is seen without numbers."""
    monkeypatch.setattr("weft.models.value_loss.sum_over", lambda axis, x, mesh: x)
    policy, shape = PolicyLoss(**VARIANTS["ppo"]), prepared(recipe(corpus)).shape
    assert check_types(shape, Layout(tp=2), Train(), policy=policy) is not None


def test_documents_that_are_placed_alone_are_refused(corpus: str) -> None:
    rows = policy_rows(samples(), ROOM, PolicyLoss())
    loader = Loader(rows, Layout(dp=2), 0, 0, 4, 1, 2, ROOM, plan=lambda *_: ())
    with pytest.raises(UsageError, match="leave it out with a policy loss"):
        loader.step(0)


def drawn(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A layout of up to four ranks, and a policy loss, both at random."""
    rng = random.Random(seed)
    axes = rng.sample(["dp", "shard", "cp", "tp", "pp"], rng.choice([1, 2]))
    layout: dict[str, Any] = dict.fromkeys(axes, 2)
    if "cp" in layout:
        layout["context"] = rng.choice(["ring", "zigzag", "ulysses"])
    critic = rng.random() < 0.3
    if "pp" in layout and not critic:
        layout["vocab_barriers"] = rng.choice([0, 1, 2])
    correction = {
        "weight": rng.choice(["none", "token", "sequence"]),
        "low": rng.choice([None, 0.9]),
        "high": rng.choice([None, 1.05]),
        "action": rng.choice(["clip", "zero"]),
    }
    loss = {
        "normaliser": rng.choice(["tokens", "constant", "sequence"]),
        "constant": 7,
        "ratio": rng.choice(["token", "sequence", "product"]),
        "form": rng.choice(["clip", "cispo", "sapo"]),
        "clip_low": rng.choice([0.01, 0.2]),
        "clip_high": rng.choice([0.01, 0.28]),
        "dual_clip": rng.choice([None, 1.1]),
        "off_policy": rng.choice([None, 0.01]),
        "kl": rng.choice(["none", "k1", "k2", "k3"]),
        "kl_weight": 0.2,
        "kl_ratio": rng.random() < 0.5,
        "entropy": rng.choice([0.0, 0.1]),
        "advantage": "gae" if critic else "group",
        "value_clip": rng.choice([None, 0.3]),
        "correction": correction,
    }
    return layout, loss


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [pytest.param(s, marks=SLOW) for s in range(24)])
def test_drawn_losses_are_equal_under_drawn_layouts(
    pool: Any, corpus: str, seed: int
) -> None:
    layout, loss = drawn(seed)
    values = recipe(corpus, data__seq_len=ROOM).model_dump(mode="json")
    values |= {"layout": layout}
    world = Layout(**layout).world
    found = pool.run(world, difference, values, loss, "shared")[0]
    assert found.ok, (found, layout, loss)
