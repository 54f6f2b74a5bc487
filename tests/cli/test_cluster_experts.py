"""``weft experts --clusters``: each expert is a run of its own, without a group; the rest of a set is a model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import started
from tests.conftest import Command
from tests.pictures import picture_recipe, write_pictures
from weft.cli.cluster_experts import divide_images, write_division
from weft.cli.experts_command import training_words
from weft.diffusion.denoiser import open_denoiser
from weft.diffusion.picture_experts import open_picture_experts

RUNS = [
    "--set", "train.steps=2", "--set", "optimizer.lr=1e-2", "--set", "data.validation=0.2",
    "--set", "checkpoint.every=0",
]  # fmt: skip


def toml(value: Any) -> str:
    return json.dumps(value)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe of nine tiny images, the light and the dark ones of which are clusters."""
    (tmp_path / "images").mkdir()
    tree = picture_recipe(write_pictures(tmp_path / "images"))
    lines = []
    for section, values in tree.items():
        settings = values.pop("settings", None)
        lines += [f"[{section}]", *(f"{k} = {toml(v)}" for k, v in values.items())]
        if settings:
            lines += [f"[{section}.settings]", *(f"{k} = {toml(v)}" for k, v in settings.items())]  # fmt: skip
    file = tmp_path / "tiny.toml"
    file.write_text("\n".join(lines))
    return file


def trained_here(
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    ends: dict[str, int] | None = None,
) -> list[list[str]]:
    """Let ``weft experts`` run ``weft train`` in this process; those in ``ends`` end with that code at once."""
    trained: list[list[str]] = []
    other = subprocess.run

    def run(words: list[str], **how: Any) -> Any:
        if words[:3] != [sys.executable, "-m", "weft"]:
            return other(words, **how)
        trained.append(words[3:])
        name = Path(words[words.index("--out") + 1]).name
        code, said = (ends or {}).get(name), ""
        if code is None:
            code, _, said = command(*words[3:])
            assert code == 0, said
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", run)
    return trained


def counted_groups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """All process groups that are made: where their ranks meet, and how many they are."""
    groups: list[tuple[str, int]] = []
    first, further = dist.init_process_group, dist.new_group

    def init(*words: Any, **how: Any) -> Any:
        first(*words, **how)
        groups.append((type(how.get("store")).__name__, dist.get_world_size()))

    def new(*words: Any, **how: Any) -> Any:
        group = further(*words, **how)
        if group is not None and dist.get_world_size(group) > 1:
            groups.append(("new_group", dist.get_world_size(group)))
        return group

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "new_group", new)
    return groups


@pytest.mark.slow(4)
def test_no_group_exists_and_the_set_is_sampled(
    command: Command, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = counted_groups(monkeypatch)
    trained = trained_here(monkeypatch, command)
    out = tmp_path / "set"
    words = ["experts", recipe, "--clusters", 2, *RUNS, "--router-steps", 3, "--out", out]  # fmt: skip
    code, _, said = command(*words, "--only", "cluster-1")
    assert code == 0 and len(trained) == 1, said
    code, printed, said = command(*words, "--expert", "cluster-0 model.layers=1", "--top", 1)  # fmt: skip
    assert code == 0 and "router: takes" in said and "cluster-0" in printed, said
    # the one that was there goes on, which is to say that it ends at once
    assert [words[-2:] for words in trained[1:]].count(["--resume", "auto"]) == 1
    # one for each of the three runs, which nobody else can join as its store is in the process
    assert groups == [("HashStore", 1)] * 3
    joined = open_picture_experts(out)
    assert joined is not None and joined.weigher.top == 1
    assert [len(e.blocks) for e in joined.experts if e] == [1, 2]
    ask = ["sample", "--checkpoint", out, "--count", 3, "--steps", 2]
    code, _, said = command(*ask, "--out", tmp_path / "a", "--guidance", 2)
    assert code == 0 and "by the likeliest 1 of 2 experts" in said, said
    assert sum(map(int, said.split("computed ")[1].split(" noised")[0].split(","))) == 12  # fmt: skip
    code, _, said = command(*ask, "--out", tmp_path / "b", "--top", 0, "--class", "1")
    assert code == 0 and "by all of 2 experts" in said
    assert torch.load(tmp_path / "b" / "samples.pt").shape == (3, 1, 5, 6)
    # a lost expert is said, and its cluster masked
    (out / "cluster-0").rename(tmp_path / "gone")
    code, _, said = command(*ask, "--out", tmp_path / "c", "--top", 0)
    assert code == 0 and "expert cluster-0 of" in said and "does not exist" in said
    assert "its cluster is masked" in said
    alone = torch.load(tmp_path / "c" / "samples.pt")
    assert command("sample", "--checkpoint", out / "cluster-1", *ask[3:], "--out", tmp_path / "d")[0] == 0  # fmt: skip
    torch.testing.assert_close(alone, torch.load(tmp_path / "d" / "samples.pt"))
    for words in (["--layout", "cp=2"], ["--table", "exact"], ["--top", 3], ["--frames", 2]):  # fmt: skip
        code, _, said = command(*ask, "--out", tmp_path / "e", *words)
        assert code == 2 and said.count("\n") == 1, said
    for words in (["serve", "--port", 0], ["generate", "--prompt", "3"], ["eval", "--held-out", recipe]):  # fmt: skip
        code, _, said = command(*words, "--checkpoint", out)
        assert code == 2 and said.endswith("ask them with weft sample --checkpoint\n")


def test_one_that_fails_does_not_keep_the_others(
    command: Command, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = {"cluster-0": -9, "cluster-1": 0}
    trained = trained_here(monkeypatch, command, ends)
    words = ["experts", recipe, "--clusters", 2, *RUNS, "--out", tmp_path / "set"]
    code, _, said = command(*words)
    assert code == 1 and "cluster-0 has ended with exit code -9" in said
    assert len(trained) == 2
    ends["cluster-0"] = 130  # Ctrl-C ends the command
    assert command(*words)[0] == 1 and len(trained) == 3
    code, printed, _ = command(*words, "--lost", "cluster-0")
    assert code == 0 and "not joined yet: cluster-1 of" in printed


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--clusters", 1], "give at least 2"),
        (["--clusters", 0], "give at least 2"),
        (["--clusters", 10], "--clusters 10 of 9 images"),
        (["--clusters", 2, "--top", 3], "--top 3 of 2"),
        (["--clusters", 2, "--only", "cluster-2"], "none of the experts"),
        (["--clusters", 2, "--lost", "cluster-0", "--lost", "cluster-1"], "one must"),
        (["--clusters", 2, "--prior", 1], "--prior is of texts"),
        (["--clusters", 2, "--expert", "code model.layers=1"], "none of the experts"),
        (["--clusters", 2, "--features", "none.npy"], "cannot be read"),
        (["--clusters", 9], "has no images to learn from"),
        (["--expert", "a"], "give --clusters"),
        (["--features", "x.npy", "--expert", "a"], "--features is for --clusters"),
        ([], "no experts are named"),
        *(
            (["--clusters", 2, "--expert", f"cluster-1 model.settings.{setting}"], word)
            for setting, word in (
                ("target=v", "what is predicted must be the same"),
                ("size=[4,6]", "the size of images"),
                ("channels=3", "the number of channels"),
                ("classes=4", "the number of classes"),
            )
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_joined_is_refused_before_anything_is_trained(
    command: Command, recipe: Path, tmp_path: Path, more: list[str], word: str
) -> None:
    code, _, said = command("experts", recipe, *RUNS, *more, "--out", tmp_path / "set")
    assert code in (1, 2) and word in said and said.count("\n") == 1, said
    assert not (tmp_path / "set").exists()


def test_clusters_are_not_divided_anew(
    command: Command, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_here(monkeypatch, command, {"cluster-0": 0, "cluster-1": 0})
    words = ["experts", recipe, *RUNS, "--out", tmp_path / "set", "--clusters"]
    assert "9 images in clusters of 5, 4" in command(*words, 2)[2]
    before = (tmp_path / "set" / "clusters.npz").read_bytes()
    assert command(*words, 2)[0] == 0
    assert (tmp_path / "set" / "clusters.npz").read_bytes() == before
    assert "has 2 clusters, and --clusters 3" in command(*words, 3)[2]
    features = tmp_path / "features.npy"
    np.save(features, np.arange(9.0)[:, None])
    assert "by other features" in command(*words, 2, "--features", features)[2]
    write_pictures(tmp_path / "images", 6)
    assert "divides other images" in command(*words, 2)[2]


def parameters(run: Path) -> dict[str, torch.Tensor]:
    return dict(open_denoiser(run).model.state_dict())


@pytest.mark.soak
def test_a_killed_expert_leaves_the_other_as_it_is(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = RUNS[1::2]
    steps = {0: ["train.steps=100000", "checkpoint.every=1"], 1: ["train.steps=20"]}
    running, folders = {}, {}
    for kind in ("both", "alone"):
        out = tmp_path / kind
        out.mkdir()
        divided = divide_images(recipe, overrides, [], 2, None, out)
        write_division(divided, out)
        for number in (0, 1) if kind == "both" else (1,):
            wish, run = divided.wishes[number], out / f"cluster-{number}"
            words = training_words(recipe, wish, [*overrides, *steps[number]], run)
            running[kind, number] = started.Started(*words)
            folders[kind, number] = run
    killed = running["both", 0]
    limit = time.monotonic() + 300
    while not (folders["both", 0] / "checkpoints").is_dir():
        assert killed.poll() is None and time.monotonic() < limit
        time.sleep(0.05)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait(60) == -signal.SIGKILL
    for number in ("both", 1), ("alone", 1):
        assert running[number].wait(300) == 0
    survivor, alone = (parameters(folders[kind, 1]) for kind in ("both", "alone"))
    assert survivor.keys() == alone.keys() and survivor
    assert all(torch.equal(survivor[name], alone[name]) for name in alone)
