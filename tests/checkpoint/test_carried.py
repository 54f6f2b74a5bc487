"""What comes with a model comes out of an export again: every field of its config, its sampling defaults, its type."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import recipe, write_corpus
from tests.chats import TEMPLATES, save_tokenizer
from weft.checkpoint.convert import convert
from weft.checkpoint.model import export_model, open_model
from weft.errors import WeftError
from weft.layout.mesh import Mesh
from weft.models.hugging_face import export
from weft.models.transformer import Transformer
from weft.recipe import build_recipe
from weft.shapes.carried_files import (
    carried_config,
    context_length,
    exported_config,
    files_of_run,
)
from weft.shapes.config import shape_from_config, shape_from_fields
from weft.train.setup import prepare
from weft.train.training import train_job

transformers = pytest.importorskip("transformers")

TINY = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "num_hidden_layers": 2}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
LATENT = {"kv_lora_rank": 6, "q_lora_rank": None, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
          "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
          "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
#: A small model of every family, by its ``model_type``.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": None}, "qwen2": {}, "qwen3": {}, "gemma3_text": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 3}, "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS, "deepseek_v2": LATENT, "deepseek_v3": LATENT,
}  # fmt: skip
#: The contents of shared/cases/models.jsonl.
CASES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "max_position_embeddings": 32768},
    "gemma3": {"model_type": "gemma3_text", "max_position_embeddings": 131072},
    "llama3.1": {
        "model_type": "llama", "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    },
}  # fmt: skip
SAMPLING = {
    "temperature": 0.6,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "do_sample": True,
}

VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-9, 1 << 20)
    | st.floats(-9, 9)
    | st.text(max_size=5)
)
#: Fields that nobody has heard of.
UNKNOWN = st.dictionaries(
    st.from_regex("x_[a-z]{1,9}", fullmatch=True), VALUES | st.lists(VALUES, max_size=3)
)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """The ``config.json`` of a small model of any family, as transformers or another program writes it."""
    kind = draw(st.sampled_from(sorted(FAMILIES)))
    config = transformers.AutoConfig.for_model(kind, **TINY | FAMILIES[kind]).to_dict()
    # Fields that change no value which Weft computes, with values that are not the defaults.
    config |= {
        "max_position_embeddings": draw(st.integers(1, 1 << 20)), "use_cache": draw(st.booleans()),
        "attention_dropout": draw(st.floats(0, 0.5)), "initializer_range": draw(st.floats(0.001, 1)),
        "rms_norm_eps": draw(st.floats(1e-9, 1e-3)), "bos_token_id": draw(st.none() | st.integers(0, 60)),
        "eos_token_id": draw(st.none() | st.integers(0, 60) | st.lists(st.integers(0, 60), min_size=1, max_size=3)),
        "transformers_version": draw(st.text(max_size=4)),
    }  # fmt: skip
    config = {
        key: value
        for key, value in config.items()
        if value is not None or draw(st.booleans())
    }
    if draw(st.booleans()):  # as transformers 4 wrote it
        rope = config.pop("rope_parameters")
        flat = rope.get("full_attention", rope)
        config |= {"rope_theta": flat["rope_theta"], "torch_dtype": "float32"}
        if kind == "gemma3_text":
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    if draw(st.booleans()):
        config["architectures"] = [transformers.AutoModelForCausalLM._model_mapping[
            transformers.CONFIG_MAPPING[kind]].__name__]  # fmt: skip
    known: dict[str, Any] = json.loads(json.dumps(config | draw(UNKNOWN)))
    return known


def weights(shape: Any) -> dict[str, torch.Tensor]:
    described = Transformer(shape, Mesh.single()).logical_parameters()
    return {name: torch.zeros(logical.shape) for name, logical in described}


@pytest.mark.slow(3)
@settings(max_examples=40, deadline=None)
@given(configs(), st.sampled_from(["float32", "bfloat16"]))
def test_every_field_of_every_family_comes_out_as_it_came_in(
    config: dict[str, Any], dtype: str
) -> None:
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        shape = shape_from_fields(config, "config.json")
        export(
            weights(shape),
            shape,
            out,
            getattr(torch, dtype),
            {"config.json": json.dumps(config).encode()},
        )
        written = json.loads((out / "config.json").read_text())
        asked = {name: dtype for name in ("dtype", "torch_dtype") if name in config}
        assert written == config | asked
        assert shape_from_config(out) == shape


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_what_training_changes_is_changed_and_nothing_else(kind: str) -> None:
    config = transformers.AutoConfig.for_model(
        kind, **TINY | FAMILIES[kind]
    ).to_dict() | {"x_note": "ours"}
    config = json.loads(json.dumps(config))
    shape = shape_from_fields(config, "config.json")
    files = {"config.json": json.dumps(config).encode()}
    grown = exported_config(shape.model_copy(update={"vocab": 70}), "float32", files)
    assert {key for key in grown.keys() | config.keys() if grown.get(key, ...) != config.get(key, ...)} == {
        "vocab_size", "dtype"} & ({"vocab_size"} | ({"dtype"} if config["dtype"] != "float32" else set()))  # fmt: skip
    assert grown["vocab_size"] == 70
    scores = exported_config(
        shape.model_copy(update={"output": "score", "tied": False}), "float32", files
    )
    assert (
        scores["architectures"][0].endswith("ForSequenceClassification")
        and scores["x_note"] == "ours"
    )
    assert len(scores["id2label"]) == 1 and not scores["tie_word_embeddings"]


def test_experts_that_are_left_out_are_left_out_of_the_config() -> None:
    for kind, name in (("mixtral", "num_local_experts"), ("qwen3_moe", "num_local_experts"),
                       ("qwen2_moe", "num_experts")):  # fmt: skip
        config = transformers.AutoConfig.for_model(
            kind, **TINY | FAMILIES[kind]
        ).to_dict()
        shape = shape_from_fields(config, "config.json").model_copy(
            update={"experts": 2}
        )
        written = exported_config(
            shape, "float32", {"config.json": json.dumps(config).encode()}
        )
        assert written[name] == 2 and shape_from_fields(written, "").experts == 2
        assert written["max_position_embeddings"] == config["max_position_embeddings"]


def test_a_dense_model_with_experts_keeps_its_context(tmp_path: Path) -> None:
    save_model(
        tmp_path / "in",
        {"model_type": "llama", "max_position_embeddings": 131072, "x_note": "ours"},
    )
    convert(
        tmp_path / "in",
        tmp_path / "weft",
        upcycle="experts=4,experts_per_token=2,expert_ffn=12",
    )
    convert(tmp_path / "weft", tmp_path / "out", to="hf")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (
        written["architectures"] == ["MixtralForCausalLM"]
        and written["num_local_experts"] == 4
    )
    assert written["max_position_embeddings"] == 131072 and written["x_note"] == "ours"


def save_model(
    folder: Path, fields: dict[str, Any], dtype: torch.dtype = torch.float32
) -> Path:
    """A tiny random model as transformers saves it, with ``fields`` in its config and a tokenizer."""
    save_tokenizer(folder, TEMPLATES["smollm2"])
    fields = {**TINY, "head_dim": 4, **FAMILIES[fields["model_type"]], **fields}
    fields["vocab_size"] = (
        transformers.AutoTokenizer.from_pretrained(folder).vocab_size + 8
    )
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(
        folder
    )
    written = json.loads((folder / "config.json").read_text())
    for name in ("rope_scaling", "x_note"):
        written |= {name: fields[name]} if name in fields else {}
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def trained(corpus: str, model: Path | None, run: Path, **change: Any) -> Path:
    """A run of one step that starts from ``model``."""
    tree = recipe(corpus, train__steps=1, train__dtype="float32", **change).model_dump(
        mode="json"
    )
    tree["model"] = {"from": str(model)} if model else tree["model"]
    tree["train"]["batch"] = 1
    settings = type(recipe(corpus)).model_validate(tree)
    train_job(prepare(settings), Mesh.create(settings.layout, "cpu"), run, None)
    return run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.sampled(2)
@pytest.mark.slow(3)
@pytest.mark.parametrize("name", CASES)
def test_a_run_carries_config_and_sampling_defaults_to_its_export(
    name: str, corpus: str, tmp_path: Path
) -> None:
    source = save_model(
        tmp_path / "in", CASES[name] | {"x_note": [1, None]}, torch.bfloat16
    )
    config = json.loads((source / "config.json").read_text())
    defaults = json.loads((source / "generation_config.json").read_text()) | SAMPLING
    (source / "generation_config.json").write_text(json.dumps(defaults))
    tokens = json.loads((source / "tokenizer_config.json").read_text()) | {
        "model_max_length": 777,
        "x_mine": {"a": 1},
    }
    (source / "tokenizer_config.json").write_text(json.dumps(tokens))
    adapter = {"adapter__rank": 2} if name == "qwen2" else {}
    run = trained(corpus, source, tmp_path / "run", **adapter)
    assert (
        context_length(open_model(str(run), "cpu", print)[1])
        == CASES[name]["max_position_embeddings"]
    )
    export_model(str(run), tmp_path / "out", print, merge=bool(adapter))
    written = json.loads((tmp_path / "out/config.json").read_text())
    # bfloat16 in, bfloat16 out
    assert written == config and written["dtype"] == "bfloat16"
    assert written["max_position_embeddings"] == CASES[name]["max_position_embeddings"]
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == defaults
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text()) == tokens
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16 and loaded.generation_config.top_k == 20

    export_model(
        str(run), tmp_path / "wide", print, merge=bool(adapter), dtype="float32"
    )
    assert json.loads((tmp_path / "wide/config.json").read_text()) == config | {
        "dtype": "float32"
    }
    assert (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide").dtype
        == torch.float32
    )
    if not adapter:  # through the other command, and a run from the run
        convert(run, tmp_path / "converted", to="hf")
        assert json.loads((tmp_path / "converted/config.json").read_text()) == config
        export_model(
            str(trained(corpus, run, tmp_path / "second")), tmp_path / "twice", print
        )
        assert json.loads((tmp_path / "twice/config.json").read_text()) == config


def test_another_tokenizer_brings_its_ids_and_nothing_else_changes(
    corpus: str, tmp_path: Path
) -> None:
    source = save_model(
        tmp_path / "in",
        CASES["qwen2"] | {"vocab_size": 999, "eos_token_id": 3, "bos_token_id": 2},
    )
    (source / "generation_config.json").write_text(
        json.dumps(SAMPLING | {"eos_token_id": 3, "bos_token_id": 2})
    )
    config = json.loads((source / "config.json").read_text())
    other = save_tokenizer(tmp_path / "other", TEMPLATES["llama3"])
    export_model(
        str(trained(corpus, source, tmp_path / "run", data__tokenizer=str(other))),
        tmp_path / "out",
        print,
    )
    written = json.loads((tmp_path / "out/config.json").read_text())
    changed = {
        key
        for key in written.keys() | config.keys()
        if written.get(key) != config.get(key)
    }
    assert (
        changed <= {"eos_token_id", "bos_token_id", "pad_token_id"}
        and written["eos_token_id"] != 3
    )
    defaults = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert (
        SAMPLING.items() <= defaults.items()
        and defaults["eos_token_id"] == written["eos_token_id"]
    )


def test_of_new_weights_the_export_says_the_length_that_they_learned_with(
    corpus: str, tmp_path: Path
) -> None:
    run = trained(corpus, None, tmp_path / "run")
    # nothing ends there
    assert context_length(open_model(str(run), "cpu", print)[1]) is None
    export_model(str(run), tmp_path / "out", print)
    assert (
        json.loads((tmp_path / "out/config.json").read_text())[
            "max_position_embeddings"
        ]
        == 19
    )


def test_rows_longer_than_the_context_are_said(corpus: str, tmp_path: Path) -> None:
    source = save_model(
        tmp_path / "in", {"model_type": "llama", "max_position_embeddings": 16}
    )
    tree = recipe(corpus).model_dump(mode="json") | {"model": {"from": str(source)}}
    (note,) = prepare(build_recipe(tree)).notes
    assert "data.seq_len = 19 is longer than the 16 tokens" in note and "\n" not in note
    tree["data"]["seq_len"] = 16
    assert not prepare(build_recipe(tree)).notes


def test_the_same_tokenizer_adds_no_file_but_its_ids() -> None:
    came = {
        "config.json": b"{}",
        "tokenizer.json": b"1",
        "tokenizer_config.json": b'{"chat_template": "x"}',
    }
    own = {
        "tokenizer.json": b"2",
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"x",
    }
    ids = {"generation_config.json": b'{"eos_token_id": [7]}'}
    assert files_of_run(came, own | ids, same_tokenizer=True) == came | ids
    assert files_of_run(
        came | {"generation_config.json": b"{}"}, own | ids, same_tokenizer=True
    ) == came | {"generation_config.json": b"{}"}
    other = files_of_run(came, own | ids, same_tokenizer=False)
    assert other["tokenizer.json"] == b"2" and json.loads(other["config.json"]) == {
        "eos_token_id": [7]
    }


def test_context_lengths() -> None:
    def of(**config: Any) -> int | None:
        return context_length({"config.json": json.dumps(config).encode()})

    assert (
        context_length({}) is None
        and of() is None
        and of(max_position_embeddings="x") is None
    )
    assert (
        of(max_position_embeddings=4096)
        == of(max_position_embeddings=4096, rope_scaling=None)
        == 4096
    )
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    # Qwen2.5's advice
    assert of(max_position_embeddings=32768, rope_scaling=yarn) == 131072
    assert of(max_position_embeddings=131072, rope_scaling=yarn) == 131072
    assert of(**CASES["llama3.1"]) == 131072
    linear = {"rope_type": "linear", "factor": 4.0}
    assert of(max_position_embeddings=4096, rope_parameters=linear) == 16384
    assert (
        of(
            max_position_embeddings=131072,
            rope_scaling=linear,
            model_type="gemma3_text",
        )
        == 131072
    )
    with pytest.raises(WeftError, match=r"config\.json is no JSON"):
        carried_config({"config.json": b"{"})


@pytest.mark.slow(3)
def test_exports_of_every_family_give_the_same_logits(tmp_path: Path) -> None:
    """Through Weft's parameters and the config that came along, in transformers; and Weft's own logits."""
    ids = torch.arange(40).view(2, 20) * 7 % 61
    ends = torch.tensor([0, 20, 40], dtype=torch.int32)
    for kind, change in FAMILIES.items():
        torch.manual_seed(1)
        config = transformers.AutoConfig.for_model(
            kind, **TINY | change | {"initializer_range": 0.3}
        )
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases are not one and zero
                parameter.data += 0.2 * torch.randn_like(parameter)
        model.save_pretrained(tmp_path / kind)
        export_model(str(tmp_path / kind), tmp_path / f"{kind}-out", print)
        again = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / f"{kind}-out", dtype=torch.float32
        )
        own = open_model(str(tmp_path / f"{kind}-out"), "cpu", print)[0]
        with torch.no_grad():
            expected = model(ids).logits
            scale = expected.abs().max()
            assert scale > 0.5
            assert (again(ids).logits - expected).abs().max() <= 2e-6 * scale, kind
            ours = own(ids, torch.arange(20).expand(2, 20), ends)
            assert (ours - expected).abs().max() <= 2e-5 * scale, kind
