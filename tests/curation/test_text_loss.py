"""The loss of a document is the model's own, whatever is beside it, in windows of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serve.running import build
from weft.checkpoint.model import open_model
from weft.curation.data_operators import OperatorFailed
from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents
from weft.curation.text_loss import text_losses, token_windows
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError, WeftError
from weft.models.hugging_face import export
from weft.parallel.build import resident_state

BYTES = load_tokenizer("bytes")
TEXTS = ["The river runs to the sea.", "x", "", "0x1f 0x2a 0x3b " * 4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model with random weights, which reads bytes."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny = build()
    held = resident_state(tiny, tiny.mesh).held
    export({p.name: p.local for p in held}, tiny.shape, folder)
    BYTES.save(folder)
    return str(folder)


def reference(model: str, text: str) -> float:
    """Mean loss of the bytes after the first, by one forward pass."""
    opened = open_model(model, "cpu", print).model
    ids = torch.tensor([list(text.encode())])
    with torch.no_grad():
        size = ids.shape[1] - 1
        ends = torch.tensor([0, size], dtype=torch.int32)
        logits = opened(ids[:, :-1], torch.arange(size)[None], ends).double()
    return float(torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]))


def test_the_loss_is_the_models_own(model: str) -> None:
    losses = text_losses(TEXTS, model)
    for text, loss in zip(TEXTS, losses, strict=True):
        assert loss.tokens == len(text.encode())
        if loss.tokens > 1:
            assert loss.loss == pytest.approx(reference(model, text), abs=1e-5)
        else:
            assert loss.loss != loss.loss
    # alone, and in another order, the same bits
    assert text_losses(TEXTS[3:], model)[0] == losses[3]
    assert text_losses(TEXTS[::-1], model)[3] == losses[0]


def test_windows_have_every_token_once() -> None:
    for count in (0, 1, 2, 5, 9, 10):
        windows = token_windows(list(range(count)), 4)
        assert [t for w in windows for t in w.following] == list(range(1, count))
        assert all(
            w.following[0] == w.given[0] + 1 and len(w.following) <= 4 for w in windows
        )


def test_a_smaller_window_sees_less(model: str) -> None:
    (whole,), (parts,) = (
        text_losses(TEXTS[3:], model),
        text_losses(TEXTS[3:], model, window=3),
    )
    assert parts.tokens == whole.tokens and parts.loss != whole.loss


def test_the_filter_keeps_a_range(model: str) -> None:
    documents = Documents(["a", "b", "c", "d"], TEXTS)
    plain: Any = DataStep(operator="perplexity", model=model).build()
    columns = plain.statistics(documents)
    assert columns["loss"][1:3] == [None, None] and columns["loss_tokens"] == [
        26,
        1,
        0,
        60,
    ]
    assert plain.reasons(columns) == [""] * 4
    first, last = columns["loss"][0], columns["loss"][3]
    low, high = sorted((first, last))
    limited: Any = DataStep(
        operator="perplexity", model=model, most=(low + high) / 2
    ).build()
    reasons = limited.reasons(columns)
    assert reasons[1:3] == ["no loss", "no loss"]
    assert sorted((reasons[0], reasons[3])) == ["", f"loss above {(low + high) / 2:g}"]
    with pytest.raises(UsageError, match="nothing would be kept"):
        DataStep(operator="perplexity", model=model, least=2, most=1)


def test_other_weights_have_another_fingerprint(model: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny = build()
    held = resident_state(tiny, tiny.mesh).held
    held[0].local.mul_(1.5)
    export({p.name: p.local for p in held}, tiny.shape, other)
    BYTES.save(other)
    steps: list[Any] = [
        DataStep(operator="perplexity", model=m).build() for m in (model, str(other))
    ]
    assert steps[0].fingerprint() != steps[1].fingerprint()
    none: Any = DataStep(operator="perplexity", model=str(tmp_path / "none")).build()
    with pytest.raises(WeftError):
        none.fingerprint()


def test_a_missing_model_or_gpu_ends_the_run(model: str, tmp_path: Path) -> None:
    """Not counted as a fault of each document."""
    with pytest.raises(OperatorFailed):
        text_losses(["a"], str(tmp_path / "none"))
    if not torch.cuda.is_available():
        with pytest.raises(OperatorFailed, match="there is no GPU here; leave it out"):
            text_losses(["a"], model, "cuda")


def test_vectors_of_a_model_go_to_the_clusters(model: str) -> None:
    texts = [f"{word} {i}" for i in range(6) for word in ("river", "0x1f 0x2a")]
    documents = Documents([f"{i:02}" for i in range(12)], texts)
    embed: Any = DataStep(operator="embed", model=model).build()
    embedded = embed.map(documents)
    vectors = embedded.columns["embedding"]
    assert {len(vector) for vector in vectors} == {32}
    assert sum(x * x for x in vectors[0]) == pytest.approx(1, abs=1e-3)
    assert embed.map(documents.select([5])).columns["embedding"] == vectors[5:6]
    step: Any = DataStep(
        operator="clusters", embedding="embedding", clusters=2, number=6
    ).build()
    (decision,) = step.decide([embedded.ids], [step.summarize(embedded)])
    # the two kinds of text are the two clusters
    assert (
        len({*decision.columns["cluster"][::2]})
        == len({*decision.columns["cluster"][1::2]})
        == 1
    )
    assert embed.map(Documents(["a"], [""])).columns["embedding"] == [None]
    assert (
        embed.fingerprint()
        == DataStep(operator="perplexity", model=model).build().fingerprint()
    )  # type: ignore[union-attr]
