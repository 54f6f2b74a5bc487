"""``weft checkpoint``: what each command finds, what it leaves alone, and mistakes that cost one line."""

from __future__ import annotations

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_golden import GOLDEN
from tests.conftest import Command
from weft.checkpoint.boxes import ROOT
from weft.checkpoint.lease import Lease
from weft.checkpoint.pack import index_within
from weft.checkpoint.staging import plan_pieces
from weft.checkpoint.storage import LocalStorage
from weft.checkpoint.store import (
    PLACES,
    committed_checkpoints,
    kept_checkpoints,
    open_checkpoint,
)
from weft.checkpoint.write_task import Commit, WriteTask
from weft.checkpoint.writer import commit, write_share
from weft.layout.dims import Tensor
from weft.layout.parts import NAMES, Part
from weft.observe.run_metrics import Metrics


@pytest.fixture
def weft(command: Command) -> Any:
    return partial(command, "checkpoint")


def save(folder: Path, values: dict[str, torch.Tensor], step: int = 1) -> Path:
    held = {
        name: Part(
            v, tuple((0, n) for n in v.shape), Tensor(tuple(v.shape), NAMES[v.dtype])
        )
        for name, v in values.items()
    }
    pieces, storage = plan_pieces(held), LocalStorage(folder)
    payload = b"".join(
        held[p.name]
        .values[index_within(p.box, held[p.name].box)]
        .contiguous()
        .view(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
        for p in pieces
    )
    shares = tuple((p.name, p.box) for p in pieces)
    tensors = {name: local.tensor for name, local in held.items()}
    job = WriteTask(
        storage, "data/a-0.safetensors", "manifest/a-0.json", tensors, shares, None
    )
    assert not write_share(job, bytearray(payload or b"-")).problem  # type: ignore[arg-type]
    meta = {
        "step": step,
        "layout": "one device",
        "world": 1,
        "data": "d",
        "progress": {"step": step, "tokens": 9},
    }
    commit(storage, Commit(("manifest/a-0.json",), meta, {}, 0))
    os.utime(folder / ROOT, (1e9 + step, 1e9 + step))
    return folder


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    return {
        "model.w": torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)),
        "model.b": torch.arange(4).bfloat16(),
        "model.scalar": torch.tensor(3),
        "model.none": torch.zeros(0, 2),
    }


def damage(folder: Path, at: int = -1) -> str:
    """Flip a bit in a data file; its name."""
    path = next((folder / "data").iterdir())
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    return path.name


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Six checkpoints with validation losses; the lowest after step 2."""
    metrics = Metrics(tmp_path / "run")
    for step, loss in enumerate([5.0, 1.0, 3.0, float("nan"), 2.0, 4.0], 1):
        save(tmp_path / f"run/checkpoints/step-{step:06d}", values(step), step)
        metrics.log("validation", step, loss=loss)
    metrics.close()
    return tmp_path / "run"


def kept(run: Path) -> list[int]:
    return [int(p.name[-6:]) for p in committed_checkpoints(run / "checkpoints")]


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_ls_tells_what_there_is(weft: Any, run: Path) -> None:
    next((run / "checkpoints/step-000005/data").iterdir()).unlink()
    (run / "checkpoints/step-000006" / ROOT).write_text("{}")
    code, out, _ = weft("ls", run)
    lines = out.splitlines()
    assert (
        code == 0
        and len(lines) == 7
        and "one device" in lines[1]
        and lines[1].endswith("seems whole")
    )
    assert (
        "a-0.safetensors is missing" in lines[5]
        and "damaged: weft.json cannot be read" in lines[6]
    )
    found = json.loads(weft("ls", run / "checkpoints", "--json")[1])
    assert (
        [r["step"] for r in found] == [1, 2, 3, 4, 5, None]
        and found[0]["tokens"] == 9
        and found[0]["world"] == 1
    )
    size = sum(
        p.stat().st_size
        for p in (run / "checkpoints/step-000001").rglob("*")
        if p.is_file()
    )
    assert found[0]["bytes"] == size and found[0]["problem"] is None


def test_inspect_shows_tensors_by_pattern(weft: Any) -> None:
    code, out, _ = weft("inspect", GOLDEN)
    assert (
        code == 0
        and re.search(r"recipe +golden, größer", out)
        and re.search(r"tokens 1,536", out)
    )
    assert re.search(r"model\.wide +3 x 1030 +F32 +row column +16 +12\.36 kB", out)
    assert (
        re.search(r"model\.scalar +scalar +I64 +- +1 +8 B", out)
        and "model.empty" in out
        and "note.txt" in out
    )
    code, out, _ = weft("inspect", GOLDEN, "tall")
    assert code == 0 and "exp_avg.model.tall" in out and "model.wide" not in out
    found = json.loads(weft("inspect", GOLDEN, "model.*a*l", "--json")[1])
    assert (
        list(found["tensors"]) == ["model.special", "model.tall"]
        and found["step"] == 12
    )
    about = {
        "shape": [11, 2, 3],
        "dtype": "BF16",
        "dims": ["row", "column", "depth"],
        "blocks": 2,
        "bytes": 132,
    }
    assert about.items() <= found["tensors"]["model.tall"].items()
    code, _, err = weft("inspect", GOLDEN, "model.wdie")
    assert code == 1 and "no tensor like 'model.wdie'" in err


def test_verify_finds_damage_wherever_it_is(
    weft: Any, tmp_path: Path, run: Path
) -> None:
    code, out, _ = weft("verify", run)
    assert code == 0 and out.count("whole") == 6
    name = damage(run / "checkpoints/step-000002")
    code, out, _ = weft("verify", run)
    assert code == 1 and out.count("whole") == 5
    assert re.search(rf"step-000002 .*damaged: data/{name} .*tensor model\.w", out)
    code, out, err = weft("verify", run / "checkpoints/step-000002")
    assert (
        code == 1
        and not out
        and name in err
        and "model.w" in err
        and err.count("\n") == 1
    )
    size = len(contents(GOLDEN)[GOLDEN / "data/golden-00000.safetensors"])
    # the head too, though only other programs read it
    for at in (0, 5, 30, 60, 4100, size - 1):
        copy = tmp_path / f"at-{at}"
        shutil.copytree(GOLDEN, copy)
        data = bytearray((copy / "data/golden-00000.safetensors").read_bytes())
        data[at + (40 if 8 < at < 4000 else 0)] ^= 1
        (copy / "data/golden-00000.safetensors").write_bytes(data)
        code, _, err = weft("verify", copy)
        assert code == 1 and "golden-00000.safetensors" in err and "tensor" in err, at


def test_diff_compares_bit_by_bit(weft: Any, tmp_path: Path) -> None:
    first, same = values(), values()
    a, b = save(tmp_path / "a", first), save(tmp_path / "b", same, step=2)
    code, out, _ = weft("diff", a, b)
    assert (
        code == 0 and "all 4 tensors are equal" in out and re.search(r"step +1 +2", out)
    )
    other = values()
    other["model.w"][1:3] += 0.5
    other["model.scalar"] = torch.tensor(3, dtype=torch.int32)
    other["model.new"] = other.pop("model.none")
    found = json.loads(weft("diff", a, save(tmp_path / "c", other), "--json")[1])
    assert (
        not found["equal"]
        and found["missing"] == ["model.none"]
        and found["extra"] == ["model.new"]
    )
    assert (
        found["changed"] == {"model.scalar": [["I64", []], ["I32", []]]}
        and found["meta"] == {}
    )
    gap = (other["model.w"] - first["model.w"]).double()
    assert found["values"] == {
        "model.w": {
            "different": 10,
            "max": pytest.approx(float(gap.abs().max())),
            "relative": pytest.approx(
                float(gap.norm() / first["model.w"].double().norm())
            ),
        }
    }
    code, out, _ = weft("diff", a, tmp_path / "c")
    assert (
        code == 1
        and re.search(r"model\.new +missing +there", out)
        and "10 of 30" in out
    )


def test_diff_sees_signs_and_nan(weft: Any, tmp_path: Path) -> None:
    a = save(tmp_path / "a", {"x": torch.tensor([0.0, 1.0, float("nan"), 1.0])})
    b = save(
        tmp_path / "b", {"x": torch.tensor([-0.0, 1.0, float("nan"), float("nan")])}
    )
    assert weft("diff", a, a)[0] == 0
    code, out, _ = weft("diff", a, b, "--json")
    assert code == 1 and json.loads(out)["values"]["x"] == {
        "different": 2,
        "max": None,
        "relative": None,
    }


def test_diff_is_the_same_in_pieces(
    weft: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = save(tmp_path / "a", values(1)), save(tmp_path / "b", values(2))
    whole = json.loads(weft("diff", a, b, "--json")[1])["values"]["model.w"]
    monkeypatch.setattr("weft.checkpoint.compare.CHUNK", 7)
    assert json.loads(weft("diff", a, b, "--json")[1])["values"][
        "model.w"
    ] == pytest.approx(whole)


def test_merge_keeps_every_bit(weft: Any, tmp_path: Path) -> None:
    before, out = contents(GOLDEN), tmp_path / "new/merged"
    assert weft("merge", GOLDEN, "--out", out)[0] == 0
    assert weft("diff", GOLDEN, out)[0] == 0 == weft("verify", out)[0]
    meta = open_checkpoint(out).meta
    assert (meta["world"], meta["layout"], len(meta["manifests"])) == (
        1,
        "one device",
        1,
    )
    assert (
        meta["merged_from"] == {"world": 2, "layout": "shard=2"}
        and meta["recipe"]["name"] == "golden, größer"
    )
    assert [p.read_bytes() for p in out.glob("files/*/note.txt")] == [
        b"the only other file\n"
    ]
    assert len(list(out.glob("data/*"))) == 1 and contents(GOLDEN) == before
    code, _, err = weft("merge", GOLDEN, "--out", out)
    assert code == 2 and "exists already" in err


def test_merge_that_fails_leaves_nothing(
    weft: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, out = tmp_path / "copy", tmp_path / "out"
    shutil.copytree(GOLDEN, copy)
    damage(copy)
    code, _, err = weft("merge", copy, "--out", out)
    assert code == 1 and "damaged" in err and not out.exists()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.checkpoint.writer.commit", interrupted)
    assert weft("merge", GOLDEN, "--out", out)[0] == 130 and not out.exists()


def test_prune_keeps_what_the_policy_says(weft: Any, run: Path) -> None:
    before = contents(run)
    code, out, _ = weft(
        "prune",
        run,
        "--keep-last",
        1,
        "--keep-every",
        3,
        "--best",
        "validation",
        "--dry-run",
    )
    assert (
        code == 0
        and out.count("would delete") == 3
        and "3 of 6 kept" in out
        and contents(run) == before
    )
    code, out, _ = weft(
        "prune", run, "--keep-last", 1, "--keep-every", 3, "--best", "validation.loss"
    )
    assert code == 0 and out.count("deleted") == 3 and kept(run) == [2, 3, 6]
    assert {p.name for p in (run / "checkpoints").iterdir()} == {
        f"step-00000{n}" for n in (2, 3, 6)
    }
    assert weft("prune", run, "--keep-last", 9)[0] == 0 and kept(run) == [2, 3, 6]


def test_prune_never_deletes_the_last_that_verifies(weft: Any, run: Path) -> None:
    for step in (4, 5, 6):
        damage(run / f"checkpoints/step-{step:06d}")
    code, out, _ = weft("prune", run, "--keep-last", 2)
    assert (
        code == 0
        and kept(run) == [3, 5, 6]
        and "damaged: step-000006, step-000005, step-000004" in out
    )
    shutil.copytree(run, run.parent / "other")
    code, out, _ = weft("prune", run.parent / "other", "--keep-last", 1)
    assert (
        code == 0
        and kept(run.parent / "other") == [3, 6]
        and "2 of 3 kept; damaged: " in out
    )
    damage(run / "checkpoints/step-000003")
    code, out, err = weft("prune", run, "--keep-last", 1)
    assert code == 1 and "no checkpoint" in err and kept(run) == [3, 5, 6]


@pytest.mark.parametrize("held", ["run/checkpoints", "elsewhere"])
def test_prune_waits_for_no_run_and_takes_nothing_from_it(
    weft: Any, run: Path, held: str
) -> None:
    """A run that trains holds its places: also those that only its list names, and that have no checkpoint yet."""
    (run / PLACES).write_text(json.dumps({"places": [str(run.parent / "elsewhere")]}))
    with Lease() as lease:
        lease.take([LocalStorage(run.parent / held)])
        before = contents(run)
        for path in {run, run.parent / held} - {run.parent / "elsewhere"}:
            code, out, err = weft("prune", path, "--keep-last", 1)
            assert (code, out) == (1, "") and re.match(
                rf"weft: error: .*{held} is in use by process \d+ on ", err
            )
        assert weft("prune", run, "--keep-last", 1, "--dry-run")[0] == 0, (
            "to look is free"
        )
        assert contents(run) == before
    changed = run.stat().st_mtime_ns
    assert weft("prune", run, "--keep-last", 1)[0] == 0 and kept(run) == [6]
    assert run.stat().st_mtime_ns == changed, (
        "by which --resume auto finds the run that was last"
    )
    assert (
        not (run.parent / "elsewhere").exists()
        and not (run / "checkpoints/lease").exists()
    )


def test_prune_spares_a_save_under_way_and_what_was_saved_last(
    weft: Any, run: Path
) -> None:
    """A run that went back to an earlier step saves before checkpoints that are there already."""
    root = run / "checkpoints"
    os.utime(root / "step-000004" / ROOT, (2e9, 2e9))
    for name, when in (("step-000002-2", 3e9), ("step-000003-2", 1.5e9)):
        (root / name / "data").mkdir(parents=True)
        (root / name / "data/.x").write_bytes(b"-")
        for path in (root / name / "data/.x", root / name / "data", root / name):
            os.utime(path, (when, when))
    assert weft("prune", run, "--keep-last", 1)[0] == 0 and kept(run) == [4, 6]
    assert (root / "step-000002-2").exists() and not (root / "step-000003-2").exists()


def test_of_one_step_the_newest_is_kept(tmp_path: Path) -> None:
    names = ["step-2", "step-2-2", "step-3", "step-4"]
    found = [LocalStorage(save(tmp_path / name, {}, i)) for i, name in enumerate(names)]
    assert kept_checkpoints(found, 1, every=2) == [found[1], found[3]]
    assert kept_checkpoints(found, 1, scores={2: 1.0, 3: 1.0, 9: 0.0}) == [
        found[2],
        found[3],
    ]
    assert kept_checkpoints([], 1) == []


@pytest.mark.parametrize(("words", "code", "said"), [
    (["ls", "none"], 1, r"none does not exist"),
    (["ls", "foreign"], 1, r"no checkpoint in foreign"),
    (["inspect", "foreign/file"], 1, r"no checkpoint in foreign/file"),
    (["inspect", "old"], 1, r"old has checkpoint format 1; this Weft reads format 2"),
    (["verify", "torn"], 1, r"torn is damaged: weft\.json cannot be read"),
    (["verify", "none"], 1, r"none does not exist"),
    (["diff", "torn", "old"], 1, r"torn is damaged"),
    (["diff", "old"], 2, r"'B'"),
    (["merge", "torn", "--out", "new"], 1, r"torn is damaged"),
    (["merge", "torn", "--out", "foreign"], 2, r"foreign exists already"),
    (["merge", "torn"], 2, r"'--out'"),
    (["prune", "foreign", "--keep-last", "1"], 1, r"no checkpoint in foreign"),
    (["prune", "old", "--keep-last", "1"], 2, r"old is one checkpoint"),
    (["prune", "old", "--keep-last", "0"], 2, r"'--keep-last'"),
    (["prune", "old"], 2, r"'--keep-last'"),
    (["pack"], 2, r"pack"),
])  # fmt: skip
def test_mistakes_cost_one_line(
    weft: Any,
    words: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, root in (
        ("old", '{"format": 1, "step": 3, "files": {}}'),
        ("torn", '{"format": 2, "xx'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / ROOT).write_text(root)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/file").write_text("x")
    before = contents(tmp_path)
    ended, _, err = weft(*words)
    assert ended == code and re.search(said, err), err
    assert (
        err.startswith("weft: error: ")
        and err.count("\n") == 1
        and contents(tmp_path) == before
    )


def test_best_needs_a_metric_that_was_recorded(weft: Any, run: Path) -> None:
    code, _, err = weft("prune", run, "--keep-last", 1, "--best", "validation.accuracy")
    assert (
        code == 2
        and "--best validation.accuracy" in err
        and kept(run) == [1, 2, 3, 4, 5, 6]
    )
