"""Tokens that a model has never seen: rows that are added, what learns them, and PEFT's words for both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.cases import recipe, write_corpus
from tests.checkpoint.test_peft import SHAPE, TOKENS, logits
from tests.checkpoint.test_resume import go
from weft.checkpoint.convert.peft import (
    CONFIG,
    PeftAdapter,
    read_adapter,
    write_adapter,
)
from weft.checkpoint.model import export_model, open_model
from weft.checkpoint.store import open_checkpoint
from weft.checkpoint.weights import open_pretrained
from weft.errors import UsageError, WeftError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.placement import Place
from weft.models.adapters import merged_parameters
from weft.models.grown_vocabulary import grown
from weft.models.hugging_face import export, hf_values
from weft.models.transformer import Transformer
from weft.models.values import seeded_values, with_adapter
from weft.parallel.build import parallelize
from weft.recipe import Adapter, ModelShape, Recipe, Train, build_recipe
from weft.train.setup import prepare

OLD = 300


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A small random Llama of 97 tokens, as transformers reads it."""
    folder = tmp_path_factory.mktemp("base") / "model"
    shape = SHAPE.model_copy(update={"tied": request.param})
    state = parallelize(shape, Mesh.single(), Train())[1]
    export({h.name: h.local for h in state.held}, shape, folder)
    return folder


def model_of(folder: Path, vocab: int) -> Path:
    shape = ModelShape(
        vocab=vocab,
        layers=2,
        embed=24,
        heads=4,
        kv_heads=2,
        head_dim=6,
        ffn=40,
        init_std=0.1,
    )
    state = parallelize(shape, Mesh.single(), Train())[1]
    export({h.name: h.local for h in state.held}, shape, folder)
    return folder


def tree(corpus: str, model: Path, vocab: int = 0, **change: Any) -> dict[str, Any]:
    """A run from ``model`` with a tokenizer of 314 entries."""
    usual = {"data__tokenizer": "train:314", "train__steps": 2, "optimizer__lr": 1e-2}
    values = recipe(corpus, **usual | change).model_dump(mode="json")
    return values | {"model": {"from": str(model), "vocab": vocab}}


def settings_of(corpus: str, model: Path, vocab: int = 0, **change: Any) -> Recipe:
    return build_recipe(tree(corpus, model, vocab, **change))


def whole(folder: Path | str) -> dict[str, torch.Tensor]:
    found = open_model(str(folder), "cpu", print)[0]
    return merged_parameters(found)


def test_the_hint_names_what_helps(corpus: str, tmp_path: Path) -> None:
    """The case ``grown-vocabulary``."""
    model = model_of(tmp_path / "model", OLD)
    with pytest.raises(
        UsageError, match=r"has 314 entries .* is 300; set model\.vocab = 314"
    ) as no:
        prepare(settings_of(corpus, model))
    assert "\n" not in str(no.value) and "vocab = 0" not in str(no.value)
    with pytest.raises(
        UsageError, match=r"set model\.vocab = 314.*adapter\.tokens = 'new'"
    ):
        prepare(settings_of(corpus, model, adapter__rank=2))
    assert prepare(settings_of(corpus, model, 314)).shape.vocab == 314
    assert prepare(settings_of(corpus, model, 320)).shape.vocab == 320
    with pytest.raises(UsageError, match=r"model\.vocab = 299, but model\.from .* 300"):
        prepare(settings_of(corpus, model, 299))
    for change, said in (
        (
            {"adapter__tokens": "new"},
            "'new' is for a vocabulary that grows: model.from has 300 tokens",
        ),
        (
            {"adapter__tokens": [314]},
            "adapter.tokens: 314 is not the id of one of 314 tokens",
        ),
    ):
        with pytest.raises(UsageError, match=said):
            grow = 0 if "new" in change.values() else 314
            prepare(
                settings_of(
                    corpus,
                    model,
                    grow,
                    **change | ({} if grow else {"data__tokenizer": "bytes"}),
                )
            )


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([(1, 1), (2, 1), (3, 2), (1, 3)]),
)
def test_every_rank_reads_its_rows_of_what_has_grown(
    old: int, new: int, tied: bool, cut: tuple[int, int]
) -> None:
    small = ModelShape(vocab=old, layers=1, embed=6, heads=3, ffn=4, tied=tied)
    shape = small.model_copy(update={"vocab": old + new})
    values = grown(seeded_values(0), small, old + new)
    described = dict(Transformer(shape, Mesh.single()).logical_parameters())
    full = {
        name: values(name, logical, logical.box) for name, logical in described.items()
    }
    for name in ("embedding.table", *([] if tied else ["head"])):
        before = seeded_values(0)(name, dict(Transformer(small, Mesh.single()).logical_parameters())[name], (
            (0, old), (0, 6)))  # fmt: skip
        assert torch.equal(full[name][:old], before)
        assert torch.allclose(
            full[name][old:], before.mean(0).expand(new, -1), atol=1e-7
        )
    layout = Layout(tp=cut[0], shard=cut[1])
    for rank in range(layout.world):
        mesh = Mesh(layout, torch.device("cpu"), Place.of(layout, rank))
        for name, logical in Transformer(shape, mesh).logical_parameters():
            lo, hi = (
                mesh.place.hold(logical).rows
                if hasattr(mesh.place.hold(logical), "rows")
                else (0, None)
            )
            box = logical.rows(lo, logical.local_shape[0] if hi is None else hi)
            assert torch.equal(
                values(name, logical, box),
                full[name][tuple(slice(*one) for one in box)],
            ), name


@pytest.mark.slow(5)
def test_runs_of_any_layout_grow_alike_and_export(
    pool: Any, corpus: str, tmp_path: Path
) -> None:
    model = model_of(tmp_path / "model", OLD)
    for name, change in {
        "all": {},
        "new": {"adapter__rank": 2, "adapter__tokens": "new"},
    }.items():
        for axis, ranks in {"shard": 1, "tp": 2, "pp": 2}.items():
            run = tree(corpus, model, 314, **change, **{f"layout__{axis}": ranks})
            pool.run(ranks, go, run, str(tmp_path / f"{name}-{axis}"))
        first = whole(tmp_path / f"{name}-shard")
        for axis in ("tp", "pp"):
            for key, value in whole(tmp_path / f"{name}-{axis}").items():
                assert torch.allclose(value, first[key], rtol=0, atol=1e-6), (axis, key)
        started = grown(hf_values(model), open_pretrained(model).shape, 314)
        for key in ("embedding.table", "head"):
            logical = dict(
                Transformer(
                    open_pretrained(tmp_path / "all-tp").shape, Mesh.single()
                ).logical_parameters()
            )
            moved = (
                first[key] - started(key, logical[key], logical[key].box)
            ).abs().amax(1) > 1e-6
            assert moved[OLD:].any() and moved[:OLD].any() == (name == "all")
    stored = open_checkpoint(tmp_path / "new-tp/checkpoints/step-000002").tensors
    assert {n for n in stored if n.startswith("model.") and ".rows" in n} == {
        "model.embedding.adapters.table.rows", "model.outputs.adapters.head.rows"}  # fmt: skip
    assert all(".adapters." in name for name in stored)

    transformers, peft = (
        pytest.importorskip("transformers"),
        pytest.importorskip("peft"),
    )
    ours = open_model(str(tmp_path / "new-tp"), "cpu", print)[0]
    export_model(str(tmp_path / "new-tp"), tmp_path / "merged", print, merge=True)
    export_model(str(tmp_path / "new-tp"), tmp_path / "adapter", print)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (
        merged.config.vocab_size == 314
        and merged.get_input_embeddings().weight.shape == (314, 24)
    )
    ids = torch.arange(274, 314).view(2, 20)
    with torch.no_grad():
        expected = ours(
            ids,
            torch.arange(20).expand(2, 20),
            torch.tensor([0, 20, 40], dtype=torch.int32),
        )
        assert (
            merged(ids).logits - expected
        ).abs().max() < 1e-5 * expected.abs().max().clamp(1)
        plain = transformers.AutoModelForCausalLM.from_pretrained(model)
        plain.resize_token_embeddings(314)
        assert (
            peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")(ids).logits
            - expected
        ).abs().max() < 1e-4


LEARNED: list[dict[str, Any]] = [
    {"tokens": (0, 5, 96)}, {"tokens": (7,), "tokens_of": ("embed_tokens",)}, {"whole": ("embed_tokens",)},
    {"whole": ("embed_tokens",), "tokens": (1, 2), "tokens_of": ("lm_head",)}, {"whole": ("embed_tokens", "lm_head")},
]  # fmt: skip


@pytest.mark.parametrize("learned", LEARNED, ids=str)
def test_peft_and_weft_read_each_other(
    learned: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    peft, transformers = (
        pytest.importorskip("peft"),
        pytest.importorskip("transformers"),
    )
    plain = open_pretrained(base).shape
    if plain.tied:
        learned = learned | {
            "whole": tuple(n for n in learned.get("whole", ()) if n != "lm_head")
        }
        learned = {"whole": learned["whole"]} if learned["whole"] else learned
    shape = plain.model_copy(
        update={"adapter": Adapter(rank=2, targets=("wq",), **learned)}
    )
    model, state = parallelize(
        shape, Mesh.single(), Train(), with_adapter(hf_values(base), shape, 0)
    )
    before = logits(model)
    assert torch.allclose(
        before,
        logits(parallelize(plain, Mesh.single(), Train(), hf_values(base))[0]),
        atol=1e-6,
    )
    assert {h.name for h in state.learning} > {
        h.name for h in state.learning if ".attention." in h.name
    }
    for h in state.learning:
        h.local += 0.1 * torch.randn(
            h.local.shape, generator=torch.Generator().manual_seed(len(h.name))
        )
    ours = logits(model)
    assert (ours - before).abs().max() > 0.1
    merged = merged_parameters(model)
    again, _ = parallelize(
        plain, Mesh.single(), Train(), lambda name, logical, box: merged[name]
    )
    assert (logits(again) - ours).abs().max() < 1e-5

    write_adapter(dict(model.named_parameters()), shape, str(base), tmp_path / "ours")
    llama = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(llama, tmp_path / "ours")
    with torch.no_grad():
        assert (theirs(TOKENS).logits - ours).abs().max() < 1e-5
    theirs.save_pretrained(tmp_path / "theirs")
    read = open_pretrained(tmp_path / "theirs")
    assert torch.equal(
        logits(parallelize(read.shape, Mesh.single(), Train(), read.values)[0]), ours
    )
    with pytest.raises(WeftError, match=r"rows of the vocabulary.*merged"):
        read_adapter(tmp_path / "ours", again)


@pytest.mark.parametrize(
    "given", [[60, 3, 9], {"embed_tokens": [9, 3], "lm_head": [3, 9]}], ids=str
)
def test_rows_that_peft_has_trained(given: Any, base: Path, tmp_path: Path) -> None:
    peft, transformers = (
        pytest.importorskip("peft"),
        pytest.importorskip("transformers"),
    )
    llama = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj"],
        trainable_token_indices=given,
        init_lora_weights=False,
    )
    if llama.config.tie_word_embeddings and isinstance(given, dict):
        pytest.skip("PEFT trains these apart, of a weight that is one")
    theirs = peft.get_peft_model(llama, config)
    for number, (name, parameter) in enumerate(theirs.named_parameters()):
        if "trainable_tokens" in name:
            noise = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(number)
            )
            parameter.data += noise
    theirs.save_pretrained(tmp_path / "theirs")
    read = open_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    assert (
        logits(parallelize(read.shape, Mesh.single(), Train(), read.values)[0])
        - expected
    ).abs().max() < 1e-5


@pytest.mark.parametrize("whole_too", [False, True])
def test_a_vocabulary_that_peft_has_grown(
    whole_too: bool, base: Path, tmp_path: Path
) -> None:
    peft, transformers = (
        pytest.importorskip("peft"),
        pytest.importorskip("transformers"),
    )
    llama = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tied = llama.config.tie_word_embeddings
    llama.resize_token_embeddings(101, mean_resizing=False)
    saved = (
        {"modules_to_save": ["embed_tokens", "lm_head"]}
        if whole_too and not tied
        else {}
    )
    saved |= {"trainable_token_indices": [99, 3]} if whole_too and tied else {}
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], init_lora_weights=False, **saved
    )
    theirs = peft.get_peft_model(llama, config)
    if saved:
        for name, parameter in theirs.named_parameters():
            parameter.data += "modules_to_save" in name or "trainable_tokens" in name
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=True)
    if tied and any(
        "lm_head" not in n
        for n in load_file(tmp_path / "theirs/adapter_model.safetensors")
    ):
        about = json.loads((tmp_path / "theirs" / CONFIG).read_text())
        (tmp_path / "theirs" / CONFIG).write_text(
            json.dumps(about | {"ensure_weight_tying": True})
        )
    read = open_pretrained(tmp_path / "theirs")
    assert read.shape.vocab == 101
    ids = torch.arange(61, 101).view(2, 20)
    with torch.no_grad():
        expected = theirs(ids).logits
        found = parallelize(read.shape, Mesh.single(), Train(), read.values)[0](
            ids, torch.arange(20).expand(2, 20), torch.tensor([0, 20, 40], dtype=torch.int32))  # fmt: skip
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


def test_what_weft_would_compute_otherwise_is_refused(
    base: Path, tmp_path: Path
) -> None:
    peft, transformers = (
        pytest.importorskip("peft"),
        pytest.importorskip("transformers"),
    )
    for number, (change, said) in enumerate((
        ({"modules_to_save": ["q_proj"], "target_modules": ["k_proj"]}, "modules_to_save has 'q_proj'"),
        ({"trainable_token_indices": {"embed_tokens": [3], "lm_head": [4]}}, "other tokens for embed_tokens"),
        ({"modules_to_save": ["embed_tokens"]}, "trains embed_tokens and lm_head apart"),
    )):  # fmt: skip
        llama = transformers.AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32
        )
        if llama.config.tie_word_embeddings != (number == 2):
            continue
        config = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **change})
        peft.get_peft_model(llama, config).save_pretrained(tmp_path / str(number))
        with pytest.raises(WeftError, match=said) as no:
            PeftAdapter(tmp_path / str(number)).values(
                open_pretrained(base).shape.model_copy(
                    update={"adapter": PeftAdapter(tmp_path / str(number)).adapter}
                )
            )
        assert "\n" not in str(no.value)
