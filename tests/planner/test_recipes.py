"""What the planner writes can be trained as it is, and what cannot be trained yet is said and not written."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from weft.checkpoint.weights import shape_named
from weft.planner.explain import best_alternatives
from weft.planner.job import rank_layouts, read_job
from weft.planner.planned_model import SECTIONS, SHAPES, load_model
from weft.planner.planned_recipe import recipe_tree
from weft.recipe import ModelShape, RopeScaling, build_recipe, load_recipe
from weft.shapes.config import config_from_shape
from weft.train.setup import model_shape, prepare

TINY = ModelShape(layers=2, embed=32, heads=4, kv_heads=2, ffn=64, vocab=300, rope_theta=7e5, norm_eps=1e-6,
                  rope_scaling=RopeScaling(factor=8))  # fmt: skip
GEMMA_2 = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def plan(command: Command) -> Any:
    return partial(command, "plan")


def config_in(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "shape", [TINY, TINY.model_copy(update={"qk_norm": True, "rope_scaling": None})]
)
def test_a_plan_for_a_config_is_trained_from_its_recipe_alone(
    plan: Any,
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shape: ModelShape,
) -> None:
    given, out = (
        config_in(tmp_path / "given", config_from_shape(shape)),
        tmp_path / "plan.toml",
    )
    demands = [
        "--cluster",
        "cpu",
        "--gpus",
        1,
        "--batch",
        2,
        "--seq",
        32,
        "--precision",
        "fp32",
    ]
    assert plan(given, *demands, "--recipe", out)[0] == 0
    recipe = load_recipe(out)
    assert model_shape(recipe).model_copy(update={"origin": None}) == shape
    monkeypatch.chdir(tmp_path)
    code, text, err = command(
        "train", out, "--set", "train.steps=1", "--set", "validation.every=0"
    )
    assert code == 0 and "checkpoint" in text, err


def test_a_built_in_model_keeps_every_field_in_its_recipe(
    plan: Any, tmp_path: Path
) -> None:
    out = tmp_path / "plan.toml"
    assert (
        plan(
            "llama3.2-1b",
            "--cluster",
            "h100",
            "--gpus",
            8,
            "--batch",
            8,
            "--seq",
            2048,
            "--recipe",
            out,
        )[0]
        == 0
    )
    recipe = load_recipe(out)
    assert recipe.model == SECTIONS["llama3.2-1b"] and recipe.model.rope_theta == 5e5
    assert (
        recipe.model.rope_scaling is not None and recipe.model.rope_scaling.factor == 32
    )
    text = out.read_text()
    assert "[data]" in text and "rope_theta" in text and 'tokenizer = "bytes"' in text


def test_built_in_sections_are_what_config_json_says() -> None:
    """Every built-in that can be trained survives a trip through the config.json that Hugging Face would read."""
    for name, section in SECTIONS.items():
        assert load_model(name).untrainable == "" and SHAPES[name].parameters > 1e9
        config = config_from_shape(section)
        assert (
            config["rope_theta"] == section.rope_theta
            and config["vocab_size"] == section.vocab
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("gpt-oss-20b", "config.json"),
        ("gpt-22b", "SwiGLU only"),
        ("gemma", "Gemma2ForCausalLM"),
    ],
)
def test_what_cannot_be_trained_is_said_and_gets_no_recipe(
    plan: Any, tmp_path: Path, model: str, reason: str
) -> None:
    name = config_in(tmp_path / "gemma", GEMMA_2) if model == "gemma" else model
    demands = [name, "--cluster", "h100", "--gpus", 8, "--batch", 8, "--seq", 2048]
    code, text, _ = plan(*demands, "--html", tmp_path / "plan.html")
    assert code == 0 and "not trainable yet" in text and reason in text
    assert "Not trainable yet" in (tmp_path / "plan.html").read_text()
    assert reason in json.loads(plan(*demands, "--json")[1])["not_trainable"]
    code, _, err = plan(*demands, "--recipe", tmp_path / "plan.toml")
    assert code == 2 and reason in err and not (tmp_path / "plan.toml").exists()


def test_precisions_that_weft_does_not_train_in_get_no_recipe(
    plan: Any, tmp_path: Path
) -> None:
    demands = [
        "llama3-8b",
        "--cluster",
        "h100",
        "--gpus",
        8,
        "--batch",
        8,
        "--seq",
        2048,
        "--precision",
        "fp8",
    ]
    assert (
        "not trainable yet: weft train has no products of 8 bits" in plan(*demands)[1]
    )
    code, _, err = plan(*demands, "--recipe", tmp_path / "plan.toml")
    assert code == 2 and "8 bits" in err


def test_a_recipe_keeps_what_its_owner_said(plan: Any, tmp_path: Path) -> None:
    """The width of its floats, and an update that only pipelines have, which then must be one."""
    own, out = tmp_path / "own.toml", tmp_path / "plan.toml"
    own.write_text(
        "[model]\nlayers = 4\nembed = 64\n[layout]\npp = 2\n[optimizer]\npost_validation = true\n"
        '[train]\ndtype = "float64"\nbatch = 8\n'
    )
    assert plan(own, "--cluster", "cpu", "--gpus", 4, "--recipe", out)[0] == 0
    recipe = load_recipe(out)
    assert (
        recipe.train.dtype == "float64"
        and recipe.layout.pp > 1
        and recipe.optimizer.post_validation
    )
    prepare(recipe)


@pytest.mark.parametrize(
    ("text", "kept", "changed"),
    [
        (
            "[layout]\ndp = 2\nscan = 'pass'\n[memory]\nweights = 'file'\nfolder = '/scratch'\nbuffer = 7\n"
            "speculate = 'all'\n[train]\nbatch = 8\nmicro_batch = 3\n[observe]\ntrace = 3\n",
            "layout.scan memory.folder memory.speculate",
            "train.micro_batch memory.weights memory.buffer",
        ),
        (
            "[layout]\ndp = 2\nisland = 2\nscan = 'pass'\n[memory]\nmoments = 'host'\nalternate = 0.0\n"
            "[generate]\nprompts = ['A']\n",
            "layout.scan memory.alternate",
            "layout.island memory.moments",
        ),
    ],
)
def test_a_planned_recipe_keeps_all_sections(
    plan: Any, tmp_path: Path, text: str, kept: str, changed: str
) -> None:
    """What it cannot keep, as it goes with another layout or place, is said."""
    own, out = tmp_path / "own.toml", tmp_path / "plan.toml"
    own.write_text("[model]\nlayers = 2\nembed = 64\n" + text)
    code, said, err = plan(own, "--cluster", "h100", "--gpus", 2, "--recipe", out)
    assert code == 0, err
    before, after = load_recipe(own), load_recipe(out)
    for setting in kept.split():
        section, _, name = setting.partition(".")
        assert getattr(getattr(after, section), name) == getattr(
            getattr(before, section), name
        )
    others = {name for name, _ in before} - {"name", "layout", "memory", "train"}
    assert all(getattr(after, name) == getattr(before, name) for name in others)
    lines = [line for line in said.splitlines() if line.startswith("changed ")]
    assert [line.split()[1] for line in lines] == changed.split()


@pytest.mark.parametrize(("name", "devices"), [("coded", 4), ("robust", 5)])
def test_every_plan_of_a_recipe_is_one_that_it_takes(name: str, devices: int) -> None:
    job = read_job(
        name, "h100", devices, None, None, None, "weft", [], 1.0, shape_named
    )  # fmt: skip
    ranked = rank_layouts(job, None, Path("none"), 5)
    for final in ranked.finals:
        build_recipe(recipe_tree(final, job.model))
    for each in best_alternatives(ranked.searched, ranked.finals):
        if each.final is not None:
            build_recipe(recipe_tree(each.final, job.model))


def test_a_plan_of_experts_spreads_them_as_the_recipe_says(
    plan: Any, tmp_path: Path
) -> None:
    given, out = (
        Path(__file__).parents[2] / "recipes" / "experts.toml",
        tmp_path / "plan.toml",
    )
    code, text, _ = plan(
        given,
        "--cluster",
        "h100",
        "--gpus",
        8,
        "--batch",
        64,
        "--seq",
        2048,
        "--recipe",
        out,
    )
    assert code == 0 and " ep=" in text.split("tokens/s")[1].splitlines()[1]
    layout = load_recipe(out).layout
    # which is refused where ep does not fold
    assert layout.ep > 1 and layout.world == 8
    prepare(load_recipe(out))
