"""Every technique is a leaf: it is imported when it is named, and nothing misses a file that is gone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from weft import registry
from weft.checkpoint.convert import open_foreign
from weft.checkpoint.pruned_model import pruner_of
from weft.cluster.dispatch_policy import dispatch_policy
from weft.curation.data_pipeline import DataStep
from weft.data.remote_files import open_store
from weft.diffusion.sampling_check import sampling_scheme_of
from weft.errors import UsageError
from weft.generate.cache_policy import cache_policy_of
from weft.generate.drafter import check_ahead
from weft.generate.policies import policy_of
from weft.generate.quotas import quota_of
from weft.recipe import Observe, build_recipe, policy_loss
from weft.registry import KINDS, declared, find, names
from weft.train.setup import prepare

PACKAGE = Path(__file__).parents[2] / "weft"
#: Every technique of Weft's own, as its kind and its name.
OWN = [(kind, name) for kind in KINDS for name in registry._own_names(kind)]

#: What a recipe says beside a technique of some kinds, without which it is not asked for.
BESIDE: dict[str, dict[str, object]] = {
    "overlap": {"tp": 2},
    "schedule": {"pp": 2},
    "context": {"cp": 2},
    "dispatch": {"dp": 2, "ep": 2, "node": 1},
}

#: What asks for a technique that fills phases of a step.
ASKED: dict[str, dict[str, dict[str, object]]] = {
    "zeroth-order": {"optimizer": {"estimate": "zeroth-order"}},
    "post-validation": {"optimizer": {"post_validation": True}, "layout": {"pp": 2}},
    "in-backward": {"optimizer": {"in_backward": True, "clip": 0}},
    "speculation": {"memory": {"speculate": "all"}},
    "alternating-updates": {"memory": {"weights": "host", "alternate": 0.5}},
    "embedding-rows": {
        "memory": {"weights": "file", "embedding": "rows"},
        "model": {"tied": False},
        "optimizer": {"kind": "sgd", "weight_decay": 0.0},
    },
    "tiled-weights": {"memory": {"weights": "file", "tiles": 2}},
    "gradient-code": {
        "layout": {"dp": 4},
        "resilience": {"code": "gradient", "stragglers": 1},
    },
    "aggregation": {"layout": {"dp": 4}, "resilience": {"aggregate": "flag"}},
    "summed-islands": {"layout": {"island": 2}},
    "distillation": {"loss": {"teachers": ["elsewhere"]}},
    "separate-islands": {"layout": {"island": 2}, "sync": {"every": 2}},
    "routed-stages": {
        "layout": {"island": 2, "pp": 2},
        "sync": {"every": 2, "routes": "random"},
    },
    "federated-server": {"federated": {"listen": "localhost:7800"}},
    "federated-client": {"federated": {"join": "invitation", "name": "a"}},
    "corrected-gradients": {
        "federated": {"join": "invitation", "name": "a", "policy": "fedavg-m"}
    },
}


def streamed(kind: str = "mlp", buffer: str = "reservoir") -> dict[str, object]:
    """A recipe of a stream of samples."""
    model = {"kind": kind, "inputs": {"x": [1]}, "outputs": {"y": [1]}}
    return {"model": model, "stream": {"producers": ["simulate"], "buffer": buffer}}


#: Recipes whose samples come from elsewhere than files.
SAMPLED = {
    "rl": {"rl": {}, "tasks": [{"reward": "addition"}]}, "stream": streamed(),
    "federated": {"federated": {"listen": "127.0.0.1:7800"}},
}  # fmt: skip

#: What names a technique of a kind that no recipe names.
NAMED_BY: dict[str, Callable[[str], object]] = {
    "policy": lambda name: policy_of(name),
    "format": lambda name: open_foreign(PACKAGE, name),
    "pruner": lambda name: pruner_of(name),
    # what it is asked first
    "drafter": lambda name: check_ahead(name, 1),
    "dispatch-policy": lambda name: dispatch_policy(name),
    "quota": lambda name: quota_of(name),
    "search": lambda name: find("search", name),
    "cache-policy": lambda name: cache_policy_of(f"{name}:1"),
    "sampling-table": lambda name: sampling_scheme_of(name),
    "phases": lambda name: build_recipe(ASKED[name]),
    "tracker": lambda name: build_recipe({"observe": {"trackers": [name]}}),
    "task": lambda name: build_recipe({"tasks": [{"reward": name}]}),
    "policy-loss": lambda name: policy_loss(name),
    "operator": lambda name: DataStep(operator=name),
    # as TokenSums does, which needs ranks
    "sum": lambda name: find("sum", name),
    "remote": lambda name: open_store(f"{name}://host"),
    "samples": lambda name: prepare(build_recipe(SAMPLED[name])),
    "buffer": lambda name: build_recipe(streamed(buffer=name)),
    "sampler": lambda name: find("sampler", name),
    "dataset": lambda name: prepare(
        build_recipe({"model": {"kind": "diffusion"}, "data": {"kind": name}})
    ),
    "surrogate": lambda name: build_recipe(streamed(kind=name)),
}


def tree(kind: str, name: str) -> dict[str, object]:
    """A recipe that names a technique, and nothing else."""
    section, _, field = KINDS[kind].setting.partition(".")
    return {section: {field: name} | BESIDE.get(kind, {})}


def test_there_are_leaves() -> None:
    assert ("optimizer", "muon") in OWN and ("moments", "8bit") in OWN


@pytest.mark.parametrize(("kind", "name"), OWN)
def test_each_file_declares_its_name(kind: str, name: str) -> None:
    technique = find(kind, name)
    assert technique.module == registry._own_module(kind, name)
    assert technique.implementation.__doc__


def test_a_declaration_does_without_pytorch() -> None:
    """Recipes are read by commands that do without: ``weft plan`` would wait a second and a half."""
    words = "import sys\nfrom weft.registry import KINDS, declared\n"
    words += "[*map(list, map(declared, KINDS))]\nprint('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


#: Techniques that an empty recipe names.
DEFAULTS = [("optimizer", "adamw"), ("sync", "average"), ("tracker", "tensorboard")]


@pytest.mark.parametrize(
    ("kind", "name"), [leaf for leaf in OWN if leaf not in DEFAULTS]
)
def test_without_its_file_all_else_works(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naming a technique that is not there is one line; recipes that do not name it never look for it."""
    find(kind, name)
    monkeypatch.delitem(registry._REGISTERED, (kind, name))
    monkeypatch.setitem(sys.modules, registry._own_module(kind, name), None)  # type: ignore[arg-type]
    build_recipe({})
    for other in KINDS:
        assert (kind, name) not in {(t.kind, t.name) for t in declared(other)}
    with pytest.raises(UsageError, match="cannot be imported") as refused:
        ask = NAMED_BY.get(kind, lambda name: build_recipe(tree(kind, name)))
        ask(name)
    assert "\n" not in str(refused.value)


def test_a_run_names_few_leaves() -> None:
    """Without all others the quickstart trains: tests/test_footprint.py."""
    assert 0 < len(named_modules()) < 9 and not {*hidden_modules()} & named_modules()


def named_modules() -> set[str]:
    """The files of techniques that the empty recipe names."""
    sections = vars(build_recipe({})).values()
    return {t.module for section in sections for t in named_by(section)}


def hidden_modules() -> list[str]:
    """The files of all other techniques."""
    own = {registry._own_module(*leaf) for leaf in OWN}
    return sorted(own - named_modules())


def named_by(section: object) -> list[registry.Registered]:
    if isinstance(section, Observe):
        return [find("tracker", name) for name in section.trackers]
    named = getattr(section, "named", None)
    return list(named()) if named else []


def test_a_setting_of_another_technique_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from weft.recipe import load_recipe

    file = tmp_path / "mine.toml"
    file.write_text('[optimizer]\nkind = "lion"\nmomentum = 0.5\n')
    assert load_recipe(file).optimizer.kind == "lion"
    said = capsys.readouterr().err
    assert said == (
        f"{file}: optimizer.momentum = 0.5 is not used: it is a setting of 'muon', and optimizer.kind = 'lion'\n"
    )


def test_old_recipes_name_settings_of_all_techniques() -> None:
    """Checkpoints of before hold every setting of the section at its default."""
    old = {"kind": "adamw", "momentum": 0.95, "rank": 128, "block": 256, "history": 4}
    assert build_recipe({"optimizer": old}) == build_recipe({})


def test_what_a_user_adds_is_one_of_them(no_plugins: None) -> None:
    from weft.section import Section
    from weft.train.rules.update_rule import UpdateRule

    class Settings(Section):
        """What the rule is set by."""

        push: float = 2.0

    @registry.register("optimizer", "pushed", settings=Settings)
    class Pushed(UpdateRule):
        """A rule of a user's."""

    assert "pushed" in names("optimizer")
    recipe = build_recipe({"optimizer": {"kind": "pushed", "push": 3.0}})
    assert recipe.optimizer.own(Settings).push == 3.0
    with pytest.raises(UsageError, match="push"):
        build_recipe({"optimizer": {"kind": "pushed", "push": "far"}})


def test_a_schedule_of_a_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_plugins: None
) -> None:
    """By its name in a recipe and on the command line; the planner's table has it as well."""
    from weft.recipe import load_recipe
    from weft.schedule.build import build, builders

    (tmp_path / "backwards.py").write_text(
        "from weft import register\n"
        "from weft.techniques.schedules.gpipe import GPipe\n"
        "@register('schedule', 'mine')\n"
        "class Mine(GPipe):\n"
        "    about = 'a user writes this'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("recipe.toml").write_text('plugins = ["backwards"]\n')
    recipe = load_recipe("recipe.toml", layout="pp=2,schedule=mine")
    assert recipe.layout.schedule == "mine"
    assert len(list(build("mine", 2, 4))) == len(list(build("gpipe", 2, 4)))
    assert builders()["mine"].about == "a user writes this"
