"""Losses of pairs of answers: equal to one device under every layout, to plain PyTorch, and to TRL's."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.cases import recipe
from tests.generate.one_text import generate
from tests.prove.test_equality import difference
from tests.train import trl_peer
from weft.api import start
from weft.checkpoint.model import export_model, open_model
from weft.checkpoint.weights import open_pretrained
from weft.data.batch import IGNORE, Batch
from weft.errors import UsageError
from weft.generate.sampling import GREEDY
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.values import seeded_values
from weft.prove.types import check_types
from weft.recipe import Loss, ModelShape, Recipe, Train, build_recipe
from weft.registry import names
from weft.train import reference
from weft.train.reference import (
    log_probabilities,
    with_cached_reference,
    with_computed_reference,
)
from weft.train.setup import Job, build_for_training, prepare
from weft.train.step import accumulate, evaluate, nonzero_weight, pass_loss

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content }}"
    "{{ eos_token if m.role == 'assistant' else ';' }}{% endfor %}"
)
SLOW = pytest.mark.slow
#: Layouts, each with the loss that it is tried with.
CASES: list[Any] = [
    ({"shard": 2}, "dpo"),
    ({"dp": 3}, "reward"),
    ({"tp": 2}, "reward"),
    ({"tp": 2}, "ipo"),
    ({"tp": 2}, "orpo"),
    pytest.param({"pp": 2, "cp": 2}, "orpo", marks=SLOW),
    ({"shard": 2, "tp": 2}, "kto"),
    pytest.param({"pp": 2, "dp": 2, "vocab_barriers": 1}, "kto", marks=SLOW),
    pytest.param({"cp": 2, "dp": 2}, "kto", marks=SLOW),
    ({"pp": 2}, "dpo"),
    ({"pp": 2, "schedule": "zb-h1", "vocab_barriers": 1}, "simpo"),
    ({"cp": 2, "context": "zigzag"}, "dpo-norm"),
    ({"cp": 2, "tp": 2}, "reward"),
    pytest.param({"pp": 2, "tp": 2, "vocab_barriers": 2}, "ipo", marks=SLOW),
    pytest.param({"pp": 2, "cp": 2, "vocab_barriers": 1}, "dpo", marks=SLOW),
    pytest.param({"pp": 2, "cp": 2}, "reward", marks=SLOW),
    pytest.param({"pp": 2, "shard": 2, "schedule": "zb-h1"}, "reward", marks=SLOW),
    pytest.param(
        {"shard": 2, "cp": 2, "tp": 2, "context": "ulysses"}, "robust", marks=SLOW
    ),
    pytest.param({"shard": 4, "zero": 2}, "hinge", marks=SLOW),
    pytest.param({"pp": 4, "schedule": "1f1b"}, "simpo", marks=SLOW),
]


def write_pairs(folder: Path, count: int = 30) -> str:
    """Pairs of very unequal length, weight and margin."""
    rng = random.Random(5)

    def text(most: int) -> str:
        return "".join(rng.choice("abc ") for _ in range(rng.randrange(most))) + "x"

    path = folder / "pairs.jsonl"
    with path.open("w") as file:
        for i in range(count):
            row = {
                "prompt": text(6),
                "chosen": f"{i}{text(9)}",
                "rejected": f"{i}y{text(7)}",
            }
            row |= {
                "weight": rng.choice([1, 0.5, 3]),
                "margin": rng.choice([0, 0.25, -1]),
            }
            file.write(json.dumps(row) + "\n")
    return str(path)


def write_judged(pairs: str) -> str:
    """The answers of pairs, each with a label, in a file beside them; more of them are good than bad."""
    rows = []
    for number, line in enumerate(Path(pairs).read_text().splitlines()):
        pair = json.loads(line)
        rows.append(
            {
                "prompt": pair["prompt"],
                "completion": pair["chosen"],
                "label": True,
                "weight": pair["weight"],
            }
        )
        if number % 3:
            rows.append(
                {
                    "prompt": pair["prompt"],
                    "completion": pair["rejected"],
                    "label": False,
                }
            )
    path = Path(pairs).with_name("judged.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


def compared(pairs: str, kind: str, **change: Any) -> Recipe:
    source = {"kind": "preference", "path": pairs}
    if kind == "kto":
        source = {"kind": "feedback", "path": write_judged(pairs)}
        change = {"loss__desirable": 1.3, "loss__undesirable": 0.7} | change
    given = {
        "data__sources": [source],
        "data__seq_len": 61,
        "data__chat": {"template": TEMPLATE},
        "loss__kind": kind,
        "loss__beta": 0.4,
        "loss__label_smoothing": 0.1 if kind in ("dpo", "robust") else 0.0,
    }
    return recipe(pairs, **given | change)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layout", "kind"), CASES, ids=str)
def test_equal_to_one_device(
    pool: Any, pairs: str, layout: dict[str, Any], kind: str
) -> None:
    values = compared(pairs, kind).model_dump(mode="json") | {"layout": layout}
    found = pool.run(Layout(**layout).world, difference, values)[0]
    assert found.ok, found


@pytest.mark.parametrize("kind", ["dpo", "reward"])
@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2), Layout(shard=2, cp=2, tp=2), Layout(dp=2, cp=2, pp=2)],
    ids=str,
)
def test_types(pairs: str, layout: Layout, kind: str) -> None:
    settings = compared(pairs, kind)
    assert (
        check_types(prepare(settings).shape, layout, Train(), loss=settings.loss)
        is None
    )


def made(settings: Recipe) -> tuple[Job, Any, Any, Batch, Mesh]:
    """A job with a reference of other values, its model and state, and its first batch."""
    mesh = Mesh.single(torch.device("cpu"))
    job = prepare(settings)
    job = with_computed_reference(job, mesh, seeded_values(7), steps=1)
    model, state = build_for_training(job.shape, mesh, settings, seeded_values(1))
    batch, *_ = job.loader(job.corpus.train, mesh).step(0) or []
    return job, model, state, batch, mesh


def odds(mean: Any) -> torch.Tensor:
    """The log-odds of a mean log-probability."""
    p = torch.as_tensor(mean).exp()
    return (p / (1 - p)).log()


def plain_loss(model: Any, batch: Batch, kind: str, settings: Loss) -> torch.Tensor:
    """The weighted mean of the pairs' losses, from logits, document by document, by the papers' formulas."""
    assert batch.paired is not None
    rows = batch.paired
    logits = model(batch.tokens, batch.positions, batch.cu_seqlens)
    losses = []
    for i, (known, margin, weight) in enumerate(
        zip(rows.pairs.reference, rows.pairs.margin, rows.pairs.weight, strict=True)
    ):
        sides = []
        for side in (0, 1):
            mine = batch.documents == rows.segments[2 * i + side]
            if kind == "reward":
                sides.append(logits[mine][-1, 0])
                continue
            labels, own = batch.labels[mine], logits[mine].log_softmax(-1)
            value = own[torch.arange(len(labels)), labels.clamp(min=0)][
                labels != IGNORE
            ].sum()
            value = value - (0 if kind in ("simpo", "orpo") else known[side])
            sides.append(
                value
                / (
                    (labels != IGNORE).sum()
                    if kind in ("ipo", "dpo-norm", "simpo", "orpo")
                    else 1
                )
            )
        gap, beta, smooth = sides[0] - sides[1], settings.beta, settings.label_smoothing
        right, wrong = F.logsigmoid(beta * gap), F.logsigmoid(-beta * gap)
        losses.append(
            weight
            * {
                "dpo": -(1 - smooth) * right - smooth * wrong,
                "dpo-norm": -right,
                "ipo": (gap - 0.5 / beta) ** 2,
                "robust": (smooth * wrong - (1 - smooth) * right) / (1 - 2 * smooth),
                "hinge": torch.clamp(1 - beta * gap, min=0),
                "simpo": -F.logsigmoid(beta * gap - margin),
                "orpo": -sides[0]
                - beta * F.logsigmoid(odds(sides[0]) - odds(sides[1])),
                "reward": -F.logsigmoid(gap - margin),
            }[kind]
        )
    return torch.stack(losses).sum() / rows.pairs.weight.sum()


@pytest.mark.parametrize("kind", [k for k in names("pair-loss") if k != "kto"])
def test_the_loss_and_its_gradients_are_plain_pytorchs(pairs: str, kind: str) -> None:
    job, model, state, batch, mesh = made(compared(pairs, kind))
    wanted = plain_loss(model, batch, kind, job.recipe.loss)
    share = pass_loss(
        model, batch, nonzero_weight(torch.tensor(batch.label_weight)), mesh
    )
    torch.testing.assert_close(share, wanted, rtol=1e-10, atol=0)
    assert evaluate(model, state, [[batch]], mesh) == pytest.approx(
        wanted.item(), rel=1e-10
    )
    share.backward()
    mine = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    wanted.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(mine[name], p.grad, rtol=1e-8, atol=1e-12, msg=name)


def test_kto_and_its_gradients_are_plain_pytorchs(pairs: str) -> None:
    """Over a step of several passes, by the paper's formula; the point is of the whole step, without a gradient."""
    job, model, state, _, mesh = made(compared(pairs, "kto", train__micro_batch=1))
    batches = job.loader(job.corpus.train, mesh).step(0) or []
    assert len(batches) > 1
    settings, rewards, moved, weights, labels = job.recipe.loss, [], [], [], []
    for batch in batches:
        assert batch.paired is not None
        rows = batch.paired
        logits = model(batch.tokens, batch.positions, batch.cu_seqlens).log_softmax(-1)
        for i, known in enumerate(rows.pairs.reference):
            sides = []
            for side in (0, 1):
                mine = batch.documents == rows.segments[2 * i + side]
                targets = batch.labels[mine]
                own = logits[mine][torch.arange(len(targets)), targets.clamp(min=0)]
                sides.append(own[targets != IGNORE].sum() - known[side])
            rewards.append(sides[0])
            moved.append(sides[1].detach())
        weights += rows.pairs.weight.tolist()
        labels += rows.pairs.margin.tolist()
    weight, good = (
        torch.tensor(weights, dtype=torch.float64),
        torch.tensor(labels, dtype=torch.float64),
    )
    assert {*labels} == {1.0, -1.0}
    point = ((torch.stack(moved) * weight).sum() / weight.sum()).clamp(min=0)
    factor = torch.where(good > 0, settings.desirable, settings.undesirable)
    each = factor * (
        1 - torch.sigmoid(settings.beta * good * (torch.stack(rewards) - point))
    )
    wanted = (each * weight).sum() / weight.sum()
    found = accumulate(model, state, batches, mesh)
    assert model.hooks.objective.point == pytest.approx(point.item(), rel=1e-10)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-10)
    assert evaluate(model, state, [batches], mesh) == pytest.approx(
        wanted.item(), rel=1e-10
    )
    mine = {name: grad.clone() for name, grad in state.gradients().items()}
    model.zero_grad()
    wanted.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(mine[name], p.grad, rtol=1e-8, atol=1e-12, msg=name)


def test_a_policy_that_is_its_reference_has_ln_2(pairs: str) -> None:
    settings = compared(pairs, "dpo", loss__label_smoothing=0.0)
    mesh, job = Mesh.single(torch.device("cpu")), prepare(settings)
    job = with_computed_reference(job, mesh, seeded_values(1), steps=1)
    model, _ = build_for_training(job.shape, mesh, settings, seeded_values(1))
    (batch,) = job.loader(job.corpus.train, mesh).step(0) or []
    share = pass_loss(model, batch, torch.tensor(batch.label_weight), mesh)
    assert share.item() == pytest.approx(0.6931471805599453, abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "sources", "wrong"),
    [
        ("dpo", ("preference", "feedback"), "feedback"),
        ("dpo", ("feedback",), "feedback"),
        ("cross-entropy", ("chat", "feedback"), "feedback"),
        ("kto", ("feedback", "preference"), "preference"),
        ("kto", ("chat",), "chat"),
    ],
)
def test_judged_answers_are_for_kto_and_for_nothing_else(
    kind: str, sources: tuple[str, ...], wrong: str
) -> None:
    listed = [{"kind": source, "path": "x.jsonl"} for source in sources]
    with pytest.raises(
        UsageError, match=rf"loss.kind = '{kind}' with data.kind = '{wrong}'"
    ):
        build_recipe({"loss": {"kind": kind}, "data": {"sources": listed}})


# --- the reference ---


def tables(values: dict[str, Any]) -> Any:
    """The reference's log-probabilities as this rank knows them after they were computed or read."""
    settings = build_recipe(values)
    job, _ = with_cached_reference(
        prepare(settings), Mesh.create(settings.layout, "cpu")
    )
    return job.corpus.train.streams[0].pairs.reference


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", [{"cp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_every_layout_has_one_reference(
    pool: Any, pairs: str, tmp_path: Path, layout: dict[str, Any]
) -> None:
    values = compared(pairs, "dpo").model_dump(mode="json")
    found = []
    for name, way in (("one", {}), ("many", layout)):
        data = values["data"] | {"cache": str(tmp_path / name)}
        found.append(
            pool.run(
                Layout(**way).world, tables, values | {"layout": way, "data": data}
            )
        )
    for table in found[1]:
        np.testing.assert_allclose(table, found[0][0], rtol=1e-11)
    assert (found[0][0] < 0).all()


@pytest.mark.slow
def test_the_reference_is_computed_once(
    pairs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later runs and resumed ones read it; a file that was cut short, or a run that was stopped, costs it once more."""
    computed = []
    monkeypatch.setattr(
        reference,
        "log_probabilities",
        lambda *given: computed.append(1) or log_probabilities(*given),
    )
    settings = compared(
        pairs,
        "dpo",
        data__cache=str(tmp_path / "cache"),
        train__steps=2,
        checkpoint__every=1,
    )

    def run(name: str, resume: str | None = None, steps: int = 2) -> list[Any]:
        again = settings.model_copy(
            update={"train": settings.train.model_copy(update={"steps": steps})}
        )
        start(again, None if resume else tmp_path / name, resume)
        records = [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        return [r["loss"] for r in records if r["kind"] == "train"] + [
            r["message"] for r in records if "message" in r
        ]

    def stop(folder: Path, build: Any) -> Path:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(reference, "build_once", stop)
        with_cached_reference(prepare(settings), Mesh.single(torch.device("cpu")))
    assert not list((tmp_path / "cache").glob("*reference-*")) and len(computed) == 1
    first = run("first")
    assert len(computed) == 2
    assert run("second")[:2] == first[:2] and len(computed) == 2
    run("first", resume=str(tmp_path / "first"), steps=3)
    assert len(computed) == 2
    (file,) = (tmp_path / "cache").glob("reference-*/*.npy")
    file.write_bytes(file.read_bytes()[:-5])
    found = run("third")
    assert found[:2] == first[:2] and len(computed) == 3
    assert any(
        "is damaged" in str(message) and "computed again" in str(message)
        for message in found[2:]
    )


def test_a_reference_of_another_vocabulary_is_refused(
    pairs: str, tmp_path: Path
) -> None:
    other = trl_peer.save_model(tmp_path / "other", 1)
    with pytest.raises(
        UsageError,
        match=r"loss\.reference = .* has other tokens \(33\) than this run \(257\)",
    ):
        prepare(compared(pairs, "dpo", loss__reference=str(other)))
    scorer = trl_peer.save_model(
        tmp_path / "scorer", 1, trl_peer.SHAPE.model_copy(update={"output": "score"})
    )
    with pytest.raises(UsageError, match="has no weights that write text"):
        prepare(compared(pairs, "dpo", loss__reference=str(scorer)))
    with pytest.raises(UsageError, match="is a reward model"):
        prepare(
            compared(pairs, "dpo").model_copy(
                update={"model": ModelShape(origin=str(scorer))}
            )
        )


def test_a_pair_more_than_ranks(pool: Any, tmp_path: Path) -> None:
    few = write_pairs(tmp_path, 4)
    settings = compared(
        few,
        "dpo",
        data__validation=0.0,
        data__chat={"template": TEMPLATE, "pack": False},
    )
    values = settings.model_dump(mode="json") | {"layout": {"dp": 3}}
    found = pool.run(3, difference, values)[0]
    assert found.ok, found


def test_transformers_scores_as_we_do(tmp_path: Path) -> None:
    """A reward run from a pretrained model: its export has the scores that Weft computes, and is one to start from."""
    transformers = pytest.importorskip("transformers")
    policy = trl_peer.save_model(tmp_path / "policy", 1)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in trl_peer.ROWS)
    )
    data = {
        "kind": "preference",
        "path": str(tmp_path / "rows.jsonl"),
        "seq_len": 256,
        "validation": 0.0,
    }
    settings = build_recipe({
        "model": {"from": str(policy)}, "loss": {"kind": "reward"}, "data": data | {"cache": str(tmp_path / "cache")},
        "train": {"batch": 2, "steps": 2}, "checkpoint": {"export": "model"}, "observe": {"trackers": []},
    })  # fmt: skip
    start(settings, tmp_path / "run", None)
    folder = tmp_path / "run" / "export"
    if not folder.exists():  # weft train writes it after the run
        export_model(str(tmp_path / "run"), folder, print)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert theirs.config.num_labels == 1
    model, *_ = open_model(str(tmp_path / "run"), "cpu", print)
    tokens = torch.tensor(
        [[2, 12, 19, 27, 31, 1, 3, 13, 24, 1], [2, 12, 31, 1, 3, 13, 24, 13, 24, 1]]
    )
    ends = torch.tensor([0, 10, 20], dtype=torch.int32)
    with torch.no_grad():
        ours = model(tokens, torch.arange(10).expand(2, 10), ends)[:, -1]
        torch.testing.assert_close(
            theirs(tokens).logits.float(), ours, rtol=1e-5, atol=1e-6
        )
    again = prepare(
        settings.model_copy(update={"model": ModelShape(origin=str(folder))})
    )
    assert again.shape.output == "score" and not again.shape.tied
    values = open_pretrained(str(folder)).values
    assert values is not None
    logical = dict(model.logical_parameters())["head"]
    head = values("head", logical, ((0, 1), (0, 16)))
    assert head.dtype == torch.float64  # the type of the model that the run began with
    torch.testing.assert_close(
        head.float(), dict(model.named_parameters())["head"].data
    )
    with pytest.raises(UsageError, match="scores texts and writes none"):
        next(generate(model, [2, 3], 1, [], GREEDY))


# --- TRL ---


def by_weft(
    folder: Path, name: str, given: dict[str, Any]
) -> tuple[float, dict[str, float], Batch]:
    """Weft's loss and gradient norms (by Hugging Face's names) on the recorded rows."""
    from weft.shapes.foreign_names import hf_name

    kind = {"conservative": "dpo", "reward with margin": "reward"}.get(name, name)
    rows = [
        row if name == "reward with margin" else row | {"margin": 0.0}
        for row in trl_peer.ROWS
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loss = {
        "kind": kind,
        **{key: given[key] for key in ("beta", "label_smoothing") if key in given},
    }
    loss |= {"margin": given["simpo_gamma"]} if name == "simpo" else {}
    policy = trl_peer.save_model(folder / "policy", 1, trl_peer.SHAPE.model_copy(
        update={"output": "score"} if kind == "reward" else {}
    ))  # fmt: skip
    data = {
        "kind": "preference",
        "path": str(folder / "rows.jsonl"),
        "seq_len": 512,
        "validation": 0.0,
    }
    settings = build_recipe({
        "model": {"from": str(policy)}, "loss": loss, "data": data | {"cache": str(folder / "cache")},
        "train": {"batch": 1, "dtype": "float64"},
    })  # fmt: skip
    mesh, job = Mesh.single(torch.device("cpu")), prepare(settings)
    job = with_computed_reference(job, mesh, trl_peer.values(2), steps=1)
    model, _ = build_for_training(
        job.shape, mesh, settings, open_pretrained(str(policy)).values
    )
    (batch,) = job.loader(job.corpus.train, mesh).step(0) or []
    share = pass_loss(model, batch, torch.tensor(batch.label_weight), mesh)
    share.backward()
    norms = {
        hf_name(n, job.shape): p.grad.norm().item()
        for n, p in model.named_parameters()
        if p.grad is not None
    }
    return share.item(), norms, batch


RECORDED = (
    json.loads(trl_peer.RECORDED.read_text())
    if trl_peer.RECORDED.exists()
    else {"losses": {}}
)


@pytest.mark.parametrize("name", RECORDED["losses"])
def test_losses_and_gradients_are_trls(name: str, tmp_path: Path) -> None:
    given = RECORDED["losses"][name]
    loss, norms, _ = by_weft(tmp_path, name, given)
    assert loss == pytest.approx(given["loss"], rel=1e-6)
    assert norms.keys() == given["norms"].keys()
    scale = max(given["norms"].values())
    for parameter, norm in given["norms"].items():
        assert norms[parameter] == pytest.approx(norm, rel=1e-6, abs=1e-9 * scale), (
            parameter
        )


def test_ids_and_what_is_learned_are_trls(tmp_path: Path) -> None:
    _, _, batch = by_weft(tmp_path, "dpo", RECORDED["losses"]["dpo"])
    assert batch.paired is not None
    ours = []
    for document in range(2 * len(batch.paired.pairs)):
        mine = batch.documents == batch.paired.segments[document]
        tokens, labels = batch.tokens[mine].tolist(), batch.labels[mine].tolist()
        ours.append((tokens, [False, *(label != IGNORE for label in labels[:-1])]))
    theirs = []
    for ids, learned in zip(RECORDED["ids"], RECORDED["learned"], strict=True):
        size = len(ids) - ids[::-1].index(1)  # the last end of a turn
        theirs.append((ids[:size], [bool(one) for one in learned[:size]]))
    assert sorted(ours) == sorted(theirs)


@pytest.mark.slow
def test_the_record_is_what_trl_says_today() -> None:
    pytest.importorskip("trl")
    again = trl_peer.record()
    assert again["ids"] == RECORDED["ids"] and again["learned"] == RECORDED["learned"]
    for name, given in RECORDED["losses"].items():
        assert again["losses"][name]["loss"] == pytest.approx(
            given["loss"], rel=1e-9
        ), name
