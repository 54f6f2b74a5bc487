"""``weft train`` without a layout: the planner's first choice, said in one line; a layout that is there stays."""

import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.conftest import Command
from tests.started import Started
from weft.checkpoint.weights import shape_named
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.parallel.build import check_fits
from weft.planner.choose import choose_layout
from weft.planner.engine_constants import ENGINES
from weft.planner.job import read_job
from weft.planner.layout_search import Pin
from weft.planner.machine import Cluster, local_cluster
from weft.recipe import Recipe, build_recipe, load_recipe
from weft.recipe.read import recipe_of_tree

RECIPE = """
[model]
layers = 2
embed = 32
heads = 4
[data]
seq_len = 32
[train]
steps = 1
batch = 8
[validation]
every = 0
"""


def recipe_of(**train: object) -> Recipe:
    return build_recipe(
        {
            "model": {"layers": 8, "embed": 256, "heads": 8},
            "train": {"batch": 16, **train},
        }
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_choice_can_be_built_and_says_how_to_pin_it(world: int) -> None:
    recipe = recipe_of()
    choice = choose_layout(
        recipe, recipe.model, local_cluster("CPU", 4e9, world, world)
    )
    layout = choice.recipe.layout
    assert layout.world == world
    check_fits(recipe.model.model_copy(update={"vocab": 257}), layout)
    assert (
        "\n" not in choice.line
        and choice.line.startswith("layout  ")
        and f"fit {world} ranks" in choice.line
    )
    assert Layout.parse(choice.line.rpartition("--layout ")[2]) == layout
    words = list(choice.overrides)
    assert Layout.parse(words[words.index("--layout") + 1]) == layout
    assert choice == choose_layout(
        recipe, recipe.model, local_cluster("CPU", 4e9, world, world)
    ), "every rank must agree"
    noted = choice.recipe.train.planned
    assert {"layout", "train.micro_batch", "train.recompute"} <= {*noted}
    tree = recipe.recorded(given=True)
    overrides = [word for word in words if "=" in word and word != words[1]]
    ranks = recipe_of_tree(tree, "recipe", overrides, words[1])
    assert ranks.train == choice.recipe.train and ranks.memory == choice.recipe.memory


def test_what_the_recipe_says_stays() -> None:
    recipe = recipe_of(micro_batch=2, recompute="full", dtype="bfloat16")
    choice = choose_layout(recipe, recipe.model, Cluster(device="H100-80GB", count=4))
    assert (
        choice.recipe.train.micro_batch == 2 and choice.recipe.train.recompute == "full"
    )
    assert choice.recipe.train.planned[:1] == ("layout",)
    assert not {"train.micro_batch", "train.recompute"} & {*choice.recipe.train.planned}
    assert choice.recipe.model == recipe.model and choice.recipe.data == recipe.data
    with pytest.raises(
        UsageError,
        match=r"no layout for 11 ranks: .*the batch does not divide.*--layout dp=N",
    ):
        choose_layout(recipe, recipe.model, Cluster(device="H100-80GB", count=11))


@pytest.mark.parametrize("rows", [16, 64, 12])
def test_a_recipe_may_ask_for_passes_that_nobody_would_try(rows: int) -> None:
    """As long as the batch, longer than it, and such that the last pass is shorter."""
    recipe = recipe_of(micro_batch=rows)
    choice = choose_layout(recipe, recipe.model, local_cluster("CPU", 4e9, 2, 2))
    assert choice.recipe.train.micro_batch == rows
    assert f"train.micro_batch={rows}" in choice.overrides


def test_only_layouts_that_the_recipe_takes_are_chosen() -> None:
    recipe = load_recipe("coded")
    for ranks in (2, 4):
        cluster = local_cluster("CPU", 4e9, ranks, ranks)
        layout = choose_layout(recipe, recipe.model, cluster).recipe.layout
        assert layout.dp == layout.world == ranks
    odd = recipe.optimizer.model_copy(update={"pairs": True})
    no_layers = recipe.model_copy(update={"optimizer": odd})
    with pytest.raises(UsageError, match=r"takes none of the .* layouts that fit"):
        choose_layout(no_layers, recipe.model, local_cluster("CPU", 4e9, 2, 2))


@pytest.mark.parametrize(
    "memory", [{"moments": "file"}, {"weights": "file"}, {"weights": "host"}], ids=str
)
def test_what_rests_where_stays(memory: dict[str, str]) -> None:
    """Also where nobody has told of a disk; on a CPU the host is the device, and nothing is to be planned for it."""
    recipe = build_recipe(
        recipe_of().model_dump() | {"memory": {**memory, "folder": "/scratch"}}
    )
    choice = choose_layout(recipe, recipe.model, local_cluster("CPU", 4e9, 2, 2))
    assert (
        choice.recipe.memory.away == recipe.memory.away
        and choice.recipe.memory.folder == "/scratch"
    )
    said = [
        f"memory.{kind}={place}" for kind, place in memory.items() if place == "file"
    ]
    assert [word for word in choice.overrides if word.startswith("memory.")] == said


def test_parts_of_what_rests_on_the_host_stay_on_a_cpu() -> None:
    """They are for a device whose memory is the host's too, where nothing is planned for either."""
    memory = {"weights": "host", "tiles": 2, "embedding": "rows"}
    recipe = build_recipe(recipe_of().model_dump() | {"memory": memory})
    model = recipe.model.model_copy(update={"vocab": 257, "tied": False})
    choice = choose_layout(recipe, model, local_cluster("CPU", 4e9, 2, 2)).recipe
    assert choice.memory == recipe.memory
    check_fits(model, choice.layout, choice.train, choice.optimizer, choice.memory)


def test_a_plan_leaves_out_what_the_recipe_refuses(tmp_path: Path) -> None:
    slow = tmp_path / "cluster.toml"
    slow.write_text('device = "RTX 4090"\nmemory = 80\ncount = 4\n')
    file = tmp_path / "recipe.toml"
    shape = (
        "[model]\nlayers = 32\nembed = 4096\nffn = 14336\nheads = 32\nkv_heads = 8\n"
    )
    sizes = "[data]\nseq_len = 2048\n[train]\nbatch = 8\ndtype = 'bfloat16'\n"
    found = {}
    for more in ("", "compile = true\n", "[optimizer]\nkind = 'adafactor'\n"):
        file.write_text(shape + sizes + more)
        job = read_job(
            str(file), str(slow), None, None, None, None, "weft", ["tp=4"], 1.0, shape_named
        )  # fmt: skip
        found[more] = job.search(ENGINES["weft"]).plans
    plain, compiled, whole = found.values()
    assert plain.overlap.any() and whole.overlap.any() and not compiled.overlap.any()
    assert [pin.field for pin in job.pins] == ["tp", "tiles", "embedding"]
    assert Pin.parse("tiles=1") == Pin("tiles", "=", 0)  # whole, as in [memory]


def test_unknown_devices_count_as_the_nearest_in_memory() -> None:
    assert local_cluster("NVIDIA H100 80GB HBM3", 85e9, 8, 8).device == "H100-80GB"
    assert local_cluster("Some Accelerator", 24e9, 2, 2).device == "RTX 4090"
    assert local_cluster("Some Accelerator", 24e9, 2, 2).memory == 24


def torchrun(folder: Path, ranks: int) -> list[str]:
    """What each of these ranks says, which are started with the variables and the store of torchrun."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    usual = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    processes = [
        Started(
            *("train", "recipe.toml", "--out", "run"),
            cwd=folder,
            env=usual | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(240) for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, said
    return [out for out, _ in said]


def written(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / "run").glob("*.jsonl"))


@pytest.mark.slow
def test_train_plans_for_the_ranks_it_is_given(
    tmp_path: Path, launched: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    code, out, err = launched("train", "recipe.toml", "--out", "run", "--ranks", "2")
    assert code == 0, err
    lines = [line for line in out.splitlines() if line.startswith("layout  ")]
    assert len(lines) == 1 and re.search(r"--layout \S+$", lines[0])
    assert Layout.parse(lines[0].rpartition("--layout ")[2]).world == 2
    assert '"world": 2' in written(tmp_path) or '"world":2' in written(tmp_path)
    # it is the planner's still, and not as if the user had given it
    resumed = ("train", "--resume", "run", "--set", "train.steps=2")
    code, out, err = launched(*resumed, "--ranks", "4")
    assert code == 0, err
    assert re.search(r"(?m)^layout  .*that fit 4 ranks", out)
    code, out, err = launched(*resumed)
    assert code == 0 and "layout  " not in out, err


@pytest.mark.slow
def test_train_plans_for_the_ranks_of_torchrun(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    lines = "".join(torchrun(tmp_path, 2)).splitlines()
    assert sum(line.startswith("layout  ") for line in lines) == 1


@pytest.mark.slow
def test_one_rank_and_given_layouts_stay(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    code, out, _ = command(
        "train", "recipe.toml", "--out", "run", "--set", "train.device=cpu"
    )
    assert code == 0 and "layout  " not in out
    (tmp_path / "recipe.toml").write_text(RECIPE + "[layout]\ntp = 2\n")
    assert load_recipe(tmp_path / "recipe.toml").layout.tp == 2
    code, _, err = command(
        "train", "recipe.toml", "--out", "run", "--resume", "run", "--ranks", "4"
    )
    assert code == 2 and "--ranks 4, but layout tp=2 has 2" in err
