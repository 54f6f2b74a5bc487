"""Plugins: a user's own module adds to a run what the recipe names, and what is wrong with it is one line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import my_plugins, started
from tests.cases import recipe, write_corpus
from tests.checkpoint.test_resume import go, series
from tests.conftest import Command
from tests.generate.one_text import generate
from tests.prove.test_equality import difference
from weft import registry
from weft.checkpoint.model import open_model
from weft.data.batch import IGNORE
from weft.data.tasks import Text
from weft.errors import UsageError, WeftError
from weft.generate.sampling import GREEDY
from weft.layout.mesh import Mesh
from weft.models.loss import linear_cross_entropy
from weft.models.plugin_loss import TokenLoss
from weft.observe.run_metrics import read_metrics
from weft.recipe import build_recipe
from weft.train.score import scores

#: A module with something of every kind.
MODULE = """
import json
import torch
import torch.distributed as dist
from pathlib import Path
from weft.plugins import register

@register("callback", "diary")
class Diary:
    def __init__(self, file, every=2, fails_on=-1, leaves_on=-1):
        self.file, self.every, self.fails_on, self.leaves_on = Path(file), every, fails_on, leaves_on

    def write(self, run, *words):
        if run.is_main:
            with self.file.open("a") as file:
                file.write(json.dumps(words) + "\\n")

    def start(self, run):
        self.write(run, "start", run.progress.step)

    def after_step(self, run, result):
        self.write(run, "step", run.progress.step, round(result.loss, 6))
        run.log("diary", loss=result.loss)
        if run.mesh.place.rank("shard") == self.fails_on:
            raise ValueError("no ink")
        if run.mesh.place.rank("shard") == self.leaves_on:
            raise SystemExit("no paper")

    def after_evaluation(self, run, values):
        self.write(run, "evaluation", sorted(values))

    def end(self, run):
        self.write(run, "end", run.checkpoint.name)

@register("callback", "enough")
class Enough:
    every = 1

    def __init__(self, steps, on=0):
        self.steps, self.on = steps, on

    def after_step(self, run, result):
        if run.progress.step == self.steps and run.mesh.place.rank("shard") == self.on:
            run.stop("that is enough")

@register("tracker", "notes")
class Notes:
    def __init__(self, run):
        self.file = (run / "notes").open("a")

    def record(self, kind, step, values):
        self.file.write(f"{kind} {step}\\n")

    def close(self):
        self.file.close()

@register("dataset", "counting")
def counting(path, upto=40):
    for i in range(upto):
        yield " ".join(map(str, range(i, i + 9)))
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_plugins: None
) -> Iterator[Path]:
    """A folder with the module ``mine``, in which commands run; nothing of it stays."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith(("mine", "other")):
            del sys.modules[name]


def written(folder: Path, corpus: str, **change: Any) -> Path:
    """A file with a small recipe."""
    made = recipe(corpus, checkpoint__every=3, validation__every=3).model_dump(
        mode="json", exclude_unset=True
    )
    for key, value in change.items():
        section, _, name = key.partition("__")
        if name:
            made.setdefault(section, {})[name] = value
        else:
            made[section] = value
    file = folder / "recipe.toml"
    lines = [f"{key} = {toml(value)}" for key, value in made.items()]
    file.write_text("\n".join(lines) + "\n")
    return file


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(
                f"{key} = {toml(one)}" for key, one in value.items() if one is not None
            )
            + " }"
        )
    return (
        "[" + ", ".join(map(toml, value)) + "]"
        if isinstance(value, list)
        else json.dumps(value)
    )


@pytest.mark.slow
def test_a_run_with_plugins(here: Path, corpus: str) -> None:
    """On two ranks: hooks at their moments, a tracker, a data set, and an end that one rank alone asks for."""
    diary = {"name": "diary", "settings": {"file": str(here / "diary")}}
    file = written(
        here, corpus, plugins=["mine"], callbacks=[diary, {"name": "enough", "settings": {"steps": 4, "on": 1}}],
        observe__trackers=["notes"], data__sources=[{"kind": "counting", "settings": {"upto": 30}}], layout__shard=2,
        train__steps=9, checkpoint__export="model",
    )  # fmt: skip
    done = started.run("train", file, "--out", "run", main=started.trusting_plugins)
    code, out, err = done.returncode, done.stdout, done.stderr
    assert code == 0, err
    lines = [json.loads(line) for line in (here / "diary").read_text().splitlines()]
    assert [line[:2] for line in lines] == [
        ["start", 0], ["evaluation", ["validation"]], ["step", 2], ["evaluation", ["validation"]], ["step", 4],
        ["evaluation", ["validation"]], ["end", "step-000005"],
    ]  # fmt: skip
    found = read_metrics(here / "run")
    assert [r["step"] for r in found["diary"]] == [2, 4] and len(found["train"]) == 5
    assert any(
        "ended by a callback: that is enough" in r["message"] for r in found["event"]
    )
    assert (
        "train 5" in (here / "run/notes").read_text()
        and (here / "run/export/config.json").exists()
    )
    assert (
        "30 documents" in str(found["event"]) + out + err
        or found["train"][0]["loss"] > 0
    )


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("rank", "way", "reason"), [
    (0, "fails_on", "ValueError: no ink"), (1, "leaves_on", "SystemExit: no paper"),
])  # fmt: skip
def test_a_callback_that_fails_on_one_rank_is_named(
    here: Path, corpus: str, rank: int, way: str, reason: str
) -> None:
    diary = {"name": "diary", "settings": {"file": str(here / "diary"), way: rank}}
    file = written(here, corpus, plugins=["mine"], callbacks=[diary], layout__shard=2)
    done = started.run("train", file, "--out", "run", main=started.trusting_plugins)
    code, err = done.returncode, done.stderr
    said = " ".join(err.split())
    wanted = f"rank {rank}: callback 'diary' of plugin mine, after_step at step 2, failed: {reason}"
    assert (
        code == 1 and f"weft: error: {wanted}" in said and err.count("weft: error") == 1
    )
    assert (
        reason.partition(": ")[2]
        in Path(re.search(r"traceback in (\S+)\)", said)[1]).read_text()
    )  # type: ignore[index]


BROKEN = [
    ("", {"plugins": ["minne"]}, "plugins: there is no module 'minne'; install its package"),
    ("import nowhere", {}, "plugins: 'other' cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
    ("x = 1\nx / 0", {}, "'other' cannot be imported: ZeroDivisionError: division by zero ({here}/other.py:2)"),
    ("raise SystemExit('gone')", {}, "plugins: 'other' cannot be imported: SystemExit: gone ({here}/other.py:2)"),
    ("def f(:", {}, "plugins: 'other' cannot be imported: SyntaxError"),
    ("register('calback', 'x')", {}, "there is no such kind; did you mean 'callback'?"),
    ("register('callback', 'x')(3)", {}, "register('callback', 'x'): int cannot be called"),
    ("register('callback', 'diary')(print)\nimport mine", {}, "has registered one already; rename one"),
    ("", {"callbacks": ["dairy"]}, "callbacks = 'dairy' is not possible; did you mean 'diary'?"),
    ("", {"callbacks": ["diary"]}, "callback 'diary' of plugin mine cannot be called with (): missing a required"),
    ("", {"callbacks": [{"name": "enough", "settings": {"stepz": 3}}]}, "cannot be called with (stepz=)"),
    ("register('callback', 'x')(type('X', (), {}))", {"callbacks": ["x"]}, "does nothing; give it one of the methods"),
    ("@register('callback', 'x')\nclass X:\n    def end(self): ...", {"callbacks": ["x"]},
     "end of callback 'x' of plugin other cannot be called with (self, run)"),
    ("", {"loss": {"kind": "focl"}}, "loss.kind = 'focl' is not possible; choose from: cross-entropy, dpo"),
    ("", {"loss": {"kind": "dpo", "settings": {"a": 1}}}, "loss.settings are for a plugin's loss"),
    ("", {"observe__trackers": ["note"]}, "observe.trackers = 'note' is not possible; did you mean 'notes'?"),
    ("", {"observe__trackers": ["wandbb"]}, "did you mean 'wandb'?"),
    ("", {"data__sources": [{"kind": "cuonting"}]}, "data.kind = 'cuonting' is not possible; did you mean 'counting'?"),
    ("", {"data__sources": [{"kind": "counting", "settings": {"to": 3}}]}, "cannot be called with (path, to=)"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "change", "said"), BROKEN, ids=range(len(BROKEN)))
def test_mistakes_are_one_line(
    command: Command,
    here: Path,
    corpus: str,
    module: str,
    change: dict[str, Any],
    said: str,
) -> None:
    (here / "other.py").write_text(f"from weft.plugins import register\n{module}".removeprefix(
        "from weft.plugins import register\n" if module.startswith("x =") else ""
    ))  # fmt: skip
    file = written(here, corpus, **{"plugins": ["mine", "other"], **change})
    code, _, err = command("train", file)
    assert (
        code == 2 and err.startswith(f"weft: error: {file}: ") and err.count("\n") == 1
    ), err
    assert said.replace("{here}", str(here)) in err, err
    assert not (here / "runs").exists()


@pytest.mark.parametrize(("body", "said"), [
    ("yield 'a'; raise ValueError('torn')", "dataset 'x' of plugin other failed: ValueError: torn"),
    ("yield 3", "dataset 'x' of plugin other: document 1 is int, not a text"),
    ("return iter(())", "holds no document with a token in it"),
])  # fmt: skip
def test_a_data_set_that_fails_is_named(
    command: Command, here: Path, corpus: str, body: str, said: str
) -> None:
    (here / "other.py").write_text(
        f"from weft.plugins import register\n@register('dataset', 'x')\ndef x(path):\n    {body}\n"
    )
    file = written(here, corpus, plugins=["other"], data__sources=[{"kind": "x"}])
    code, _, err = command("train", file)
    assert code == 1 and said in " ".join(err.split()), err
    assert not (here / "runs").exists() and not any(
        Path(corpus).parent.glob("cache/.tokens*")
    )


def test_a_data_set_is_read_anew_when_its_code_changes(here: Path) -> None:
    from weft.data.corpora import source_fingerprint

    def seen(**settings: int) -> str:
        sources = [{"kind": "counting", "settings": settings}]
        return source_fingerprint(
            build_recipe(
                {"plugins": ["mine"], "data": {"sources": sources}}
            ).data.sources[0]
        )

    first = seen(upto=3)
    assert seen(upto=3) == first != seen(upto=4)
    (here / "mine.py").write_text(MODULE + "# more\n")
    assert seen(upto=3) != first


def test_a_kind_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'loss'"):
        registry.register("los", "x")


def own(corpus: str, **change: Any) -> dict[str, Any]:
    """A recipe with a plugin's model."""
    tree = recipe(corpus, optimizer__ema=0.5, **change).model_dump(
        mode="json", exclude_unset=True
    )
    tree["plugins"], tree["model"] = ["tests.my_plugins"], {"kind": "mixed"}
    return tree


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("world", "change"), [
    (2, {"layout__shard": 2}), (4, {"layout__dp": 2, "layout__shard": 2, "layout__zero": 3}),
    (2, {"layout__dp": 2, "train__micro_batch": 1}), (2, {"layout__shard": 2, "memory__weights": "host"}),
])  # fmt: skip
def test_a_model_of_a_plugin_equals_one_device(
    pool: Any, corpus: str, world: int, change: dict[str, Any]
) -> None:
    found = pool.run(world, difference, own(corpus, **change))[0]
    assert found.ok, found


@pytest.mark.slow
def test_a_model_of_a_plugin_is_saved_goes_on_and_writes(
    pool: Any, command: Command, corpus: str, tmp_path: Path
) -> None:
    """Under another layout, as it would have without the break; and generation reads its checkpoint."""
    tree = own(
        corpus, optimizer__schedule="constant", checkpoint__every=3, train__steps=3
    )
    more = tree | {"train": tree["train"] | {"steps": 6}}
    pool.run(1, go, more, str(tmp_path / "whole"))
    pool.run(2, go, tree | {"layout": {"shard": 2}}, str(tmp_path / "moved"))
    pool.run(1, go, more, str(tmp_path / "moved"), "auto")
    assert list(series(tmp_path / "moved").values()) == pytest.approx(
        list(series(tmp_path / "whole").values()), 1e-9
    )

    model, *_ = open_model(str(tmp_path / "moved"), "cpu", print)
    ids = [3, 1, 4, 1, 5]
    written = list(generate(model, ids, 6, (), GREEDY))
    for i, expected in enumerate(written):
        seen = torch.tensor([ids + written[:i]])
        edges = torch.tensor([0, seen.shape[1]], dtype=torch.int32)
        assert (
            int(model(seen, torch.arange(seen.shape[1])[None], edges)[0, -1].argmax())
            == expected
        )
    score = scores(model, None, model.mesh, [Text(ids, written)])[0]
    assert score.greedy and score.log_probability < 0
    code, _, err = command(
        "export", "--from", tmp_path / "moved", "--out", tmp_path / "out"
    )
    assert (
        code == 1
        and "is of a plugin's model (mixed), which no other program knows"
        in " ".join(err.split())
    )


OWN_WRONG = [
    ({"kind": "mixed", "layers": 3}, "layers is of Weft's own models"), ({"settings": {"a": 1}}, "name it as kind"),
    ({"kind": "mixd"}, "model.kind = 'mixd' is not possible; did you mean 'mixed'?"),
    ({"kind": "mixed", "settings": {"depth": 1}}, "cannot be called with (vocab, depth=)"),
    ({"kind": "wrong", "settings": {"how": "kind"}}, "returned int, which is no torch.nn.Module"),
    ({"kind": "wrong", "settings": {"how": "frozen"}}, "has no parameter that learns"),
    ({"kind": "wrong", "settings": {"how": "scalar"}}, "parameter scale has no dimension"),
    ({"kind": "wrong", "settings": {"how": "shape"}}, "where logits [1, 19, 257] are needed"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "said"), OWN_WRONG, ids=range(len(OWN_WRONG)))
def test_a_model_that_cannot_be_trained_is_refused(
    command: Command, tmp_path: Path, corpus: str, model: dict[str, Any], said: str
) -> None:
    file = written(
        tmp_path,
        corpus,
        plugins=["tests.my_plugins"],
        model=model,
        train__micro_batch=1,
    )
    code, _, err = command("train", file, "--out", tmp_path / "run")
    assert (
        code in (1, 2)
        and said in " ".join(err.split())
        and err.count("weft: error") == 1
    ), err


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("world", "change"), [
    (2, {"layout__shard": 2}), (3, {"layout__tp": 3}), (2, {"layout__cp": 2, "train__micro_batch": 2}),
    (2, {"layout__pp": 2}), (4, {"layout__pp": 2, "layout__tp": 2}), (4, {"layout__cp": 2, "layout__tp": 2}),
    (2, {"layout__dp": 2, "layout__zero": 1, "layout__balance": "greedy"}),
])  # fmt: skip
def test_a_loss_of_a_plugin_equals_one_device(
    pool: Any, corpus: str, world: int, change: dict[str, Any]
) -> None:
    tree = recipe(corpus, **change).model_dump(mode="json", exclude_unset=True)
    found = pool.run(
        world,
        difference,
        tree | {"plugins": ["tests.my_plugins"], "loss": {"kind": "focal"}},
    )[0]
    assert found.ok, found


def test_the_types_of_a_plugin_s_loss_fit(
    command: Command, corpus: str, tmp_path: Path
) -> None:
    file = written(
        tmp_path, corpus, plugins=["tests.my_plugins"], loss={"kind": "focal"}
    )
    for layout in ("tp=2,shard=2", "pp=2,cp=2"):
        code, out, err = command("verify", "--types", file, "--layout", layout)
        assert code == 0, out + err


def test_a_loss_of_a_plugin_is_differentiated_as_a_whole() -> None:
    """Its sum and gradients are those of all logits at once, with weights and labels left out."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (
        torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (23, 9)
    )
    labels = torch.randint(0, 9, (23,), generator=generator)
    labels[::4] = IGNORE
    counts = torch.rand(23, generator=generator).float()
    found = []
    for fused in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if fused:
            total = TokenLoss(my_plugins.focal, 9)(
                h, w, labels, 0, 4, Mesh.single(), counts
            )
        else:
            kept = labels != IGNORE
            total = (my_plugins.focal(h @ w.T, labels.clamp(min=0)) * counts.double())[
                kept
            ].sum()
        (total / 3).backward()
        found.append([total.detach(), h.grad, w.grad])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    plain = TokenLoss(my_plugins.plain, 9)(
        hidden, weight, labels, 0, 4, Mesh.single(), counts
    )
    torch.testing.assert_close(
        plain, linear_cross_entropy(hidden, weight, labels, 0, 4, Mesh.single(), counts)
    )
    with pytest.raises(
        WeftError, match=r"returned \[\] for 4 tokens; it returns one loss for each"
    ):
        TokenLoss(my_plugins.averaged, 9)(hidden, weight, labels, 0, 4, Mesh.single())
