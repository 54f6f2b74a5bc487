"""A run picked up under the same layout goes on bit by bit; under another one, with the same tokens and losses."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.cases import recipe, write_corpus
from weft.checkpoint.resume_check import ORIGIN, check_resumable, other_differences
from weft.checkpoint.save import Saver
from weft.checkpoint.storage import LocalStorage, StorageError
from weft.checkpoint.store import (
    check_files,
    committed_checkpoints,
    load_newest,
    open_checkpoint,
    verify,
)
from weft.data.tokenizer import load_tokenizer
from weft.errors import WeftError
from weft.layout.dims import part
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.observe.run_metrics import read_metrics
from weft.recipe import ModelShape, Optimizer, build_recipe
from weft.train.runs import prepare_run
from weft.train.setup import build_for_training, prepare
from weft.train.training import train_job

HOME, TWO = {"shard": 2, "tp": 2}, {"shard": 2}


def tree(corpus: str, layout: dict[str, Any], **change: Any) -> dict[str, Any]:
    axes = {f"layout__{axis}": size for axis, size in layout.items()}
    settings = recipe(
        corpus,
        checkpoint__every=3,
        checkpoint__keep=5,
        validation__every=3,
        **axes,
        **change,
    )
    return settings.model_dump(mode="json")


def go(values: dict[str, Any], out: str, resume: str | None = None) -> tuple[int, int]:
    """On every rank: the run. Returns its last step and data position."""
    settings = build_recipe(values)
    mesh = Mesh.create(settings.layout, "cpu")
    outcome = train_job(prepare(settings), mesh, Path(out), resume)
    return outcome.progress.step, outcome.progress.position


def state_of(checkpoint: Path, values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole, on one device."""
    settings = build_recipe(values)
    shape = build_recipe(open_checkpoint(checkpoint).meta["recipe"]).model
    mesh = Mesh.single()
    found = build_for_training(shape, mesh, settings)[1].tensors()
    open_checkpoint(checkpoint).load(found)
    return {name: local.values for name, local in found.items()}


def series(run: Path, kind: str = "train", field: str = "loss") -> dict[int, float]:
    return {r["step"]: r[field] for r in read_metrics(run)[kind]}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole_run(pool: Any, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six uninterrupted steps under HOME, with a checkpoint after three."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert pool.run(4, go, tree(corpus, HOME), str(run)) == [(6, 30)] * 4
    assert [p.name for p in committed_checkpoints(run / "checkpoints")] == [
        "step-000003",
        "step-000006",
    ]
    return run


@pytest.fixture(scope="module")
def float32_run(
    pool: Any, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """As :func:`whole_run`, in float32."""
    run = tmp_path_factory.mktemp("runs") / "float32"
    pool.run(4, go, tree(corpus, HOME, train__dtype="float32"), str(run))
    return run


@pytest.mark.slow
def test_same_layout_is_bit_exact(
    pool: Any, corpus: str, whole_run: Path, tmp_path: Path
) -> None:
    pool.run(
        4,
        go,
        tree(corpus, HOME),
        str(tmp_path / "again"),
        str(whole_run / "checkpoints/step-000003"),
    )
    assert series(tmp_path / "again") == {
        s: v for s, v in series(whole_run).items() if s > 3
    }
    assert series(tmp_path / "again", "validation") == {
        s: v for s, v in series(whole_run, "validation").items() if s > 3
    }
    mine = state_of(tmp_path / "again/checkpoints/step-000006", tree(corpus, HOME))
    reference = state_of(whole_run / "checkpoints/step-000006", tree(corpus, HOME))
    assert all(torch.equal(mine[name], reference[name]) for name in reference)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [
    {}, {"tp": 4}, {"cp": 2}, {"dp": 2, "shard": 2, "zero": 1}, {"cp": 2, "tp": 2, "shard": 2, "context": "ulysses"},
    {"shard": 3}, {"tp": 3}, {"pp": 2, "dp": 2, "schedule": "zb-v"}, {"pp": 2, "shard": 2, "vocab_barriers": 1},
    {"tp": 2, "tp_shares": [3, 1], "shard": 2},
], ids=lambda v: str(Layout(**v)).replace(" ", "_"))  # fmt: skip
@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.slow), "float64"]
)
def test_other_layout_same_tokens_and_losses(
    pool: Any,
    corpus: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    layout: dict[str, Any],
    dtype: str,
) -> None:
    source: Path = request.getfixturevalue(
        "float32_run" if dtype == "float32" else "whole_run"
    )
    run = tmp_path / "other"
    values = tree(corpus, layout, train__dtype=dtype)
    pool.run(
        Layout(**layout).world,
        go,
        values,
        str(run),
        str(source / "checkpoints/step-000003"),
    )
    expected, found = series(source), series(run)
    limit = 1e-10 if dtype == "float64" else 1e-5
    assert list(found) == [4, 5, 6]
    for step, loss in found.items():
        assert loss == pytest.approx(expected[step], rel=limit)
    assert series(run, field="tokens") == {
        s: v for s, v in series(source, field="tokens").items() if s > 3
    }


@pytest.mark.slow
def test_from_a_pipeline_to_another_layout(
    pool: Any, corpus: str, whole_run: Path, tmp_path: Path
) -> None:
    """Parameters on two ranks of a DualPipe are stored once, and post-validation leaves no half-made update."""
    pipeline = {"pp": 2, "shard": 2, "schedule": "dualpipe"}
    values = tree(corpus, pipeline, optimizer__post_validation=True, model__tied=False)
    pool.run(4, go, values, str(tmp_path / "pipeline"))
    assert series(tmp_path / "pipeline") == pytest.approx(series(whole_run), rel=1e-10)
    pool.run(
        2,
        go,
        tree(corpus, {"tp": 2}),
        str(tmp_path / "run"),
        str(tmp_path / "pipeline/checkpoints/step-000003"),
    )
    assert series(tmp_path / "run") == pytest.approx(
        {s: v for s, v in series(whole_run).items() if s > 3}, rel=1e-10
    )


@pytest.mark.slow(4)
def test_auto_resume_takes_the_last_whole_checkpoint(
    pool: Any, corpus: str, whole_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    damaged = next((run / "checkpoints/step-000006/data").glob("*.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    heard: list[str] = []
    assert load_newest([run], verify, heard.append)[0].storage.name == "step-000003"
    assert "damaged" in heard[0] and damaged.name in heard[0]
    pool.run(4, go, tree(corpus, HOME), str(run), "auto")
    # What is damaged is not written over.
    assert load_newest([run], verify, heard.append)[0].storage.name == "step-000006-2"
    events = [r["message"] for r in read_metrics(run)["event"]]
    assert any("damaged" in e for e in events) and any(
        "resumed from" in e and "step-000003" in e for e in events
    )


def test_other_model_other_data_and_no_checkpoint_are_refused(
    pool: Any, corpus: str, whole_run: Path, tmp_path: Path
) -> None:
    source = str(whole_run / "checkpoints/step-000003")
    with pytest.raises(
        WeftError,
        match=r"another model: it has model\.ffn = 41, the recipe 48; restore",
    ):
        pool.run(4, go, tree(corpus, HOME, model__ffn=48), str(tmp_path / "a"), source)
    with pytest.raises(WeftError, match="no checkpoint"):
        pool.run(1, go, tree(corpus, {}), str(tmp_path / "a"), str(tmp_path))
    with pytest.raises(WeftError, match="does not exist"):
        pool.run(
            1, go, tree(corpus, {}), str(tmp_path / "a"), str(tmp_path / "nowhere")
        )
    assert not (tmp_path / "a").exists()


#: Another value for every field of a model. Those of ORIGIN say where first values come from; they change nothing here.
OTHER: dict[str, Any] = {
    "vocab": 300, "layers": 1, "embed": 32, "heads": 6, "kv_heads": 4, "head_dim": 8, "ffn": 48, "qk_norm": True,
    "qkv_bias": True, "tied": True, "norm_eps": 1e-6, "rope_theta": 5e5, "rope_scaling": {"factor": 2.0},
    "mixer": "linear", "softmax_every": 2, "adapter": {"rank": 4}, "window": 8, "full_every": 2,
    "window_theta": 5e5, "query_dim": 8, "activation": "gelu", "scaled_embedding": True, "norm_after": True,
    "rope_interleaved": True, "q_rank": 8, "rope_dim": 2, "value_dim": 6, "experts": 4,
    "experts_per_token": 3, "shared_experts": 1, "shared_mix": "gate", "expert_ffn": 8, "first_dense": 1,
    "moe_every": 2, "router": "sigmoid", "router_norm": True, "router_scale": 2.0, "router_groups": 2,
    "router_early": True, "bias_rate": 0.1, "balance": "step", "balance_loss": 0.1,
    "z_loss": 0.1, "capacity": 1.5, "residual": "ladder", "small_ffn": 12,
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.slow
def test_every_field_of_the_model_is_compared(
    pool: Any, corpus: str, whole_run: Path, tmp_path: Path
) -> None:
    """Whatever is changed in [model], a resume is refused or exact; what another model has saved stays."""
    # These change others, which are named: a compressed cache the key-value heads, groups in use the groups there are,
    # the first ladder layer the residual, a plugin's model all; an output of scores has a loss of its own, as a critic
    # has; and what a surrogate reads and predicts stands beside its kind.
    assert OTHER.keys() | {
        *ORIGIN,
        "dropout",  # of the run, not of the model
        "kv_rank",
        "router_top_groups",
        "ladder_from",
        "kind",
        "settings",
        "output",
        "value_head",
        "inputs",
        "outputs",
    } == {*ModelShape.model_fields}
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    for name, value in OTHER.items():
        values = tree(corpus, {}, train__steps=8, **{f"model__{name}": value}) | {
            "checkpoint": {"keep": 1}
        }
        with pytest.raises(
            WeftError, match=rf"another model: it has model\.{name} = .*, the recipe "
        ) as refused:
            pool.run(1, go, values, str(run), "auto")
        assert "\n" not in str(refused.value).partition("\non rank")[0]
    assert [p.name for p in committed_checkpoints(run / "checkpoints")] == [
        "step-000003",
        "step-000006",
    ]
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert before == {
        run / p.relative_to(whole_run): p.read_bytes()
        for p in whole_run.rglob("*")
        if p.is_file()
    }
    pool.run(
        1,
        go,
        tree(corpus, {}, model__init_std=0.5),
        str(tmp_path / "b"),
        str(run / "checkpoints/step-000003"),
    )
    assert series(tmp_path / "b") == pytest.approx(
        {s: v for s, v in series(whole_run).items() if s > 3}, rel=1e-10
    )


def test_a_recipe_of_before_the_memory_section_goes_on(whole_run: Path) -> None:
    checkpoint = open_checkpoint(whole_run / "checkpoints/step-000003")
    settings = build_recipe(checkpoint.meta["recipe"])
    stored, data = checkpoint.meta["recipe"], checkpoint.meta["data"]
    for offload in ("none", "all"):
        del (old := dict(stored))["memory"]
        checkpoint.meta["recipe"] = old | {
            "train": stored["train"] | {"offload": offload}
        }
        check_resumable(
            checkpoint, settings.model, load_tokenizer("bytes"), settings.optimizer
        )
        assert other_differences(checkpoint, settings, data) == []


def test_more_layers_than_the_recipe_are_refused_by_their_tensors(
    whole_run: Path,
) -> None:
    """Also where the recipe in the checkpoint says otherwise."""
    checkpoint = open_checkpoint(whole_run / "checkpoints/step-000003")
    shape = build_recipe(checkpoint.meta["recipe"]).model
    smaller = shape.model_copy(update={"layers": 1})
    checkpoint.meta["recipe"]["model"]["layers"] = 1
    check_resumable(
        open_checkpoint(checkpoint.storage), shape, load_tokenizer("bytes"), Optimizer()
    )
    with pytest.raises(
        WeftError,
        match=r"holds \d+ tensors that this model has no place for.* model\.blocks\.1",
    ):
        check_resumable(checkpoint, smaller, load_tokenizer("bytes"), Optimizer())


def test_another_tokenizer_is_refused_and_other_settings_are_said(
    pool: Any, corpus: str, whole_run: Path, tmp_path: Path
) -> None:
    source = str(whole_run / "checkpoints/step-000003")
    model = open_checkpoint(source).meta["recipe"]["model"]
    values = tree(corpus, {}, data__tokenizer="train:257", model__vocab=model["vocab"])
    with pytest.raises(
        WeftError,
        match=r"another tokenizer \(of 257 entries, .* 257\).*restore data\.tokenizer",
    ):
        pool.run(1, go, values, str(tmp_path / "a"), source)
    assert not (tmp_path / "a").exists()
    change = {
        "optimizer__lr": 1e-3,
        "train__batch": 4,
        "data__seed": 1,
        "data__seq_len": 17,
        "train__micro_batch": 1,
    }
    pool.run(1, go, tree(corpus, {}, **change), str(tmp_path / "a"), source)
    said = [
        r["message"]
        for r in read_metrics(tmp_path / "a")["event"]
        if r["message"].startswith("resumed with")
    ]
    assert said == [
        "resumed with optimizer.lr = 0.001, the checkpoint was trained with 0.0003",
        "resumed with train.batch = 4, the checkpoint was trained with 5",
        "resumed with data.seq_len = 17, the checkpoint was trained with 19",
        "resumed with data.seed = 1, the checkpoint was trained with 0",
        "resumed with other data is read on from sample 15 of its order: some may come twice, some never",
    ]


@pytest.mark.slow
def test_what_another_model_wrote_is_neither_pruned_nor_counted(
    pool: Any, corpus: str, whole_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    other = tree(corpus, {}, model__rope_theta=5e5) | {
        "checkpoint": {"every": 1, "keep": 1}
    }
    pool.run(1, go, other, str(tmp_path / "other"))
    pool.run(
        1,
        go,
        other | {"train": other["train"] | {"steps": 8}},
        str(run),
        str(tmp_path / "other"),
    )
    assert [p.name for p in committed_checkpoints(run / "checkpoints")] == [
        "step-000003",
        "step-000006",
        "step-000008",
    ]


def test_another_model_is_refused_before_ranks_start(
    corpus: str, whole_run: Path
) -> None:
    values = build_recipe(tree(corpus, HOME, model__rope_theta=5e5))
    with pytest.raises(
        WeftError,
        match=r"step-000006 is of another model: it has model\.rope_theta = 10000\.0, the",
    ):
        prepare_run(values, None, str(whole_run))
    prepare_run(build_recipe(tree(corpus, HOME)), None, str(whole_run))


def test_a_finished_run_is_not_saved_again(
    pool: Any, corpus: str, whole_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    values = tree(corpus, {}) | {"checkpoint": {"keep": 2}}
    for resume in ("auto", str(run), str(run / "checkpoints/step-000006")):
        assert pool.run(1, go, values, str(run), resume) == [(6, 30)]
    assert [p.name for p in committed_checkpoints(run / "checkpoints")] == [
        "step-000003",
        "step-000006",
    ]


def test_a_run_of_skipped_steps_ends_with_the_reason(
    pool: Any, corpus: str, whole_run: Path, tmp_path: Path
) -> None:
    values = tree(
        corpus,
        TWO,
        train__steps=50,
        optimizer__lr=1e200,
        optimizer__warmup=0,
        train__dtype="float32",
    )
    with pytest.raises(
        WeftError,
        match=r"not finite in 5 steps in a row.*ended at step \d, .*lower optimizer\.lr",
    ):
        pool.run(2, go, values, str(tmp_path / "a"))
    assert (
        len(series(tmp_path / "a")) < 10
        and not committed_checkpoints(tmp_path / "a/checkpoints")[2:]
    )


class FullDisk(LocalStorage):
    def write(self, name: str, chunks: Any) -> int:
        raise StorageError(f"cannot write {self.root / name}: No space left on device")


def unwritable(values: dict[str, Any], out: str) -> str:
    """A rank whose disk fails while it saves."""
    import torch.distributed as dist

    try:
        if dist.get_rank() == 1:
            save = Saver.save

            def change(self: Saver, place: Any, *rest: Any, **more: Any) -> Any:
                return save(self, FullDisk(place.root), *rest, **more)

            with mock.patch.object(Saver, "save", change):
                go(values, out, out)
        else:
            go(values, out, out)
    except WeftError as error:
        return str(error)
    return ""


@pytest.mark.soak
@pytest.mark.slow
def test_full_disk_stops_all_ranks_and_keeps_the_last_checkpoint(
    pool: Any, corpus: str, whole_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    shutil.rmtree(run / "checkpoints/step-000006")
    # writers may take their time to end
    said = pool.run(4, unwritable, tree(corpus, HOME), str(run), timeout=180)
    assert all(
        "step 6 was not saved" in text and "No space left" in text for text in said
    ), said
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-000003"], (
        "nothing takes up room for nothing"
    )
    check_files(open_checkpoint(run / "checkpoints/step-000003"))


def other_seeds(values: dict[str, Any], out: str) -> bool:
    """A run in processes whose generators are in other states; whether it has left them as they were."""
    import torch.distributed as dist

    random.seed(7 * dist.get_rank())
    np.random.seed(7 * dist.get_rank())
    torch.manual_seed(7 * dist.get_rank())
    before = (
        random.getstate(),
        str(np.random.get_state()),
        torch.get_rng_state().tolist(),
    )
    go(values, out)
    return before == (
        random.getstate(),
        str(np.random.get_state()),
        torch.get_rng_state().tolist(),
    )


@pytest.mark.slow(2)
def test_nothing_random_depends_on_the_process(
    pool: Any, corpus: str, whole_run: Path, tmp_path: Path
) -> None:
    assert (
        pool.run(4, other_seeds, tree(corpus, HOME), str(tmp_path / "run"))
        == [True] * 4
    )
    assert series(tmp_path / "run") == series(whole_run)


def test_shares_tile_what_they_cut() -> None:
    for count in range(0, 12):
        for parts in range(1, 6):
            shares = [part(count, parts, i) for i in range(parts)]
            assert [i for lo, hi in shares for i in range(lo, hi)] == list(range(count))
            assert (
                max(hi - lo for lo, hi in shares) - min(hi - lo for lo, hi in shares)
                <= 1
            )
