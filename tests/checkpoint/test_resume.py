"""A run picked up under the same layout goes on bit by bit; under another one, with the same tokens and losses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.cases import recipe, write_corpus
from weft.checkpoint.save import Saver
from weft.checkpoint.storage import LocalStorage, StorageError
from weft.checkpoint.store import committed, load_newest, look, open_checkpoint, verify
from weft.errors import WeftError
from weft.layout.dims import part
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.observe.metrics import read_metrics
from weft.recipe import build_recipe
from weft.train.loop import train
from weft.train.setup import assemble, prepare

HOME = {"shard": 2, "tp": 2}


def tree(corpus: str, layout: dict[str, Any], **change: Any) -> dict[str, Any]:
    axes = {f"layout__{axis}": size for axis, size in layout.items()}
    settings = recipe(corpus, checkpoint__every=3, checkpoint__keep=5, validation__every=3, **axes, **change)
    return settings.model_dump(mode="json")


def go(values: dict[str, Any], out: str, resume: str | None = None) -> tuple[int, int]:
    """On every rank: the run. Returns its last step and data position."""
    settings = build_recipe(values)
    mesh = Mesh.create(settings.layout, "cpu")
    outcome = train(prepare(settings), mesh, Path(out), resume)
    return outcome.progress.step, outcome.progress.position


def state_of(checkpoint: Path, values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whole, on one device."""
    settings = build_recipe(values)
    shape = build_recipe(open_checkpoint(checkpoint).meta["recipe"]).model
    mesh = Mesh.single()
    found = assemble(shape, mesh, settings)[1].tensors()
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
    assert [p.name for p in committed(run / "checkpoints")] == ["step-000003", "step-000006"]
    return run


def test_same_layout_is_bit_exact(pool: Any, corpus: str, whole_run: Path, tmp_path: Path) -> None:
    pool.run(4, go, tree(corpus, HOME), str(tmp_path / "again"), str(whole_run / "checkpoints/step-000003"))
    assert series(tmp_path / "again") == {s: v for s, v in series(whole_run).items() if s > 3}
    assert series(tmp_path / "again", "validation") == {
        s: v for s, v in series(whole_run, "validation").items() if s > 3
    }
    mine = state_of(tmp_path / "again/checkpoints/step-000006", tree(corpus, HOME))
    reference = state_of(whole_run / "checkpoints/step-000006", tree(corpus, HOME))
    assert all(torch.equal(mine[name], reference[name]) for name in reference)


@pytest.mark.parametrize("layout", [
    {}, {"tp": 4}, {"cp": 2}, {"dp": 2, "shard": 2, "zero": 1}, {"cp": 2, "tp": 2, "shard": 2, "context": "ulysses"},
    {"shard": 3}, {"tp": 3}, {"pp": 2, "dp": 2, "schedule": "zb-v"}, {"pp": 2, "shard": 2, "vocab_barriers": 1},
], ids=lambda v: str(Layout(**v)).replace(" ", "_"))  # fmt: skip
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "float64"])
def test_other_layout_same_tokens_and_losses(
    pool: Any, corpus: str, whole_run: Path, tmp_path: Path, layout: dict[str, Any], dtype: str
) -> None:
    source = whole_run
    if dtype == "float32":
        source = tmp_path / "source"
        pool.run(4, go, tree(corpus, HOME, train__dtype=dtype), str(source))
    run = tmp_path / "other"
    values = tree(corpus, layout, train__dtype=dtype)
    pool.run(Layout(**layout).world, go, values, str(run), str(source / "checkpoints/step-000003"))
    expected, found = series(source), series(run)
    limit = 1e-10 if dtype == "float64" else 1e-5
    assert list(found) == [4, 5, 6]
    for step, loss in found.items():
        assert loss == pytest.approx(expected[step], rel=limit)
    assert series(run, field="tokens") == {s: v for s, v in series(source, field="tokens").items() if s > 3}


def test_from_a_pipeline_to_another_layout(pool: Any, corpus: str, whole_run: Path, tmp_path: Path) -> None:
    """Parameters on two ranks of a DualPipe are stored once, and post-validation leaves no half-made update."""
    pipeline = {"pp": 2, "shard": 2, "schedule": "dualpipe"}
    values = tree(corpus, pipeline, optimizer__post_validation=True, model__tied=False)
    pool.run(4, go, values, str(tmp_path / "pipeline"))
    assert series(tmp_path / "pipeline") == pytest.approx(series(whole_run), rel=1e-10)
    pool.run(2, go, tree(corpus, {"tp": 2}), str(tmp_path / "run"), str(tmp_path / "pipeline/checkpoints/step-000003"))
    assert series(tmp_path / "run") == pytest.approx({s: v for s, v in series(whole_run).items() if s > 3}, rel=1e-10)


def test_auto_resume_takes_the_last_whole_checkpoint(pool: Any, corpus: str, whole_run: Path, tmp_path: Path) -> None:
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
    assert any("damaged" in e for e in events) and any("resumed from" in e and "step-000003" in e for e in events)


def test_other_model_other_data_and_no_checkpoint_are_refused(
    pool: Any, corpus: str, whole_run: Path, tmp_path: Path
) -> None:
    source = str(whole_run / "checkpoints/step-000003")
    with pytest.raises(WeftError, match=r"different model.*gate: stored \[41, 24\], needed \[48, 24\]"):
        pool.run(4, go, tree(corpus, HOME, model__ffn=48), str(tmp_path / "a"), source)
    with pytest.raises(WeftError, match=r"another model:\n  missing   model.blocks.0.attention.q_norm"):
        pool.run(4, go, tree(corpus, HOME, model__qk_norm=True), str(tmp_path / "a"), source)
    with pytest.raises(WeftError, match="other data"):
        pool.run(4, go, tree(corpus, HOME, data__seed=1), str(tmp_path / "a"), source)
    with pytest.raises(WeftError, match="no checkpoint"):
        pool.run(1, go, tree(corpus, {}), str(tmp_path / "a"), str(tmp_path))
    with pytest.raises(WeftError, match="does not exist"):
        pool.run(1, go, tree(corpus, {}), str(tmp_path / "a"), str(tmp_path / "nowhere"))
    assert not (tmp_path / "a").exists()


class FullDisk(LocalStorage):
    def write(self, name: str, chunks: Any) -> int:
        raise StorageError(f"cannot write {self.root / name}: No space left on device")


def unwritable(values: dict[str, Any], out: str) -> str:
    """A rank whose disk fails while it saves."""
    import torch.distributed as dist

    try:
        if dist.get_rank() == 1:
            save = Saver.save
            change = lambda self, place, *rest, **more: save(self, FullDisk(place.root), *rest, **more)  # noqa: E731
            with mock.patch.object(Saver, "save", change):
                go(values, out, out)
        else:
            go(values, out, out)
    except WeftError as error:
        return str(error)
    return ""


def test_full_disk_stops_all_ranks_and_keeps_the_last_checkpoint(
    pool: Any, corpus: str, whole_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole_run, run)
    shutil.rmtree(run / "checkpoints/step-000006")
    said = pool.run(4, unwritable, tree(corpus, HOME), str(run))
    assert all("step 6 was not saved" in text and "No space left" in text for text in said), said
    assert [p.name for p in committed(run / "checkpoints")] == ["step-000003"]
    look(open_checkpoint(run / "checkpoints/step-000003"))


def test_shares_tile_what_they_cut() -> None:
    for count in range(0, 12):
        for parts in range(1, 6):
            shares = [part(count, parts, i) for i in range(parts)]
            assert [i for lo, hi in shares for i in range(lo, hi)] == list(range(count))
            assert max(hi - lo for lo, hi in shares) - min(hi - lo for lo, hi in shares) <= 1
