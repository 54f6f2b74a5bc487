"""L-GreCo: never above the error that was allowed, the best of all choices, and a gain on a transformer's gradients."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import recipe, start, write_corpus
from weft.sync import greco
from weft.sync.compress import build_compressor
from weft.sync.compressor import Compressor
from weft.sync.greco import allocate_compressors, alternatives_of, smallest, total
from weft.train.step import accumulate, clear_gradients, train_step

T = torch.Tensor


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[list[float]], list[list[int]], float]:
    """Errors and sizes of up to five tensors under up to four alternatives, and a budget that may be too small."""
    errors, sizes = [], []
    for _ in range(draw(st.integers(1, 5))):
        count = draw(st.integers(1, 4))
        errors.append(
            draw(
                st.lists(
                    st.floats(0, 1e3, allow_subnormal=False),
                    min_size=count,
                    max_size=count,
                )
            )
        )
        sizes.append(draw(st.lists(st.integers(0, 50), min_size=count, max_size=count)))
    chosen = [draw(st.integers(0, len(row) - 1)) for row in errors]
    return (
        errors,
        sizes,
        total(errors, chosen) * draw(st.sampled_from((1.0, 1.0, 0.5, 1.5))),
    )


@given(tables())
@settings(max_examples=100, deadline=None)
def test_the_best_of_all_choices(
    given_: tuple[list[list[float]], list[list[int]], float],
) -> None:
    errors, sizes, budget = given_
    within = [
        c
        for c in product(*(range(len(row)) for row in errors))
        if total(errors, c) <= budget
    ]
    found = smallest(errors, sizes, budget)
    assert (found is None) == (not within)
    if found is not None:
        assert total(errors, found) <= budget
        assert total(sizes, found) == min(total(sizes, c) for c in within)


@given(tables())
@settings(max_examples=60, deadline=None)
def test_what_is_thinned_out_never_breaks_the_budget(
    given_: tuple[list[list[float]], list[list[int]], float],
) -> None:
    errors, sizes, budget = given_
    with mock.patch.object(greco, "KEPT", 3):
        found = smallest(errors, sizes, budget)
    best = smallest(errors, sizes, budget)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert total(errors, found) <= budget and total(sizes, found) >= total(
            sizes, best
        )


def lost(compressor: Compressor, x: T) -> float:
    """Squared error, in the second round of two with the same tensor."""
    warm = None
    for _ in range(2):
        payload = compressor.encode(x, 0, warm)
        warm = compressor.warm(payload)
    return float((compressor.decode(payload, x.shape, 0) - x).double().square().sum())


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> dict[str, T]:
    """Of a transformer that has taken 20 steps, added up over the next 5."""
    change = {"layers": 3, "embed": 48, "head_dim": 12, "ffn": 120, "init_std": 0.05}
    corpus = write_corpus(Path(tmp_path_factory.mktemp("corpus")))
    values = recipe(
        corpus, train__dtype="float32", **{f"model__{k}": v for k, v in change.items()}
    )
    _, mesh, model, state, loader = start(values.model_dump(mode="json"))
    for step in range(20):
        train_step(model, state, loader.step(step * 5) or [], mesh, lr=3e-3, clip=1.0)
    found: dict[str, T] = {}
    for step in range(20, 25):
        accumulate(model, state, loader.step(step * 5) or [], mesh)
        found = {
            name: grad + found.get(name, 0) for name, grad in state.gradients().items()
        }
        clear_gradients(model, state)
    return found


@pytest.mark.parametrize(
    "word", ["topk:0.01", "topk:0.1", "powersgd:4", "randk:0.1", "int6", "int8", "none"]
)
def test_a_transformer_s_gradients_become_smaller(
    gradients: dict[str, T], word: str
) -> None:
    """At least 1.3x where there are alternatives; all within the error of the same setting for all."""
    usual = build_compressor(word).for_feedback
    found = allocate_compressors(gradients, usual)
    assert found.keys() == gradients.keys()
    alike, errors = (sum(usual.nbytes(x.shape) for x in gradients.values()),
                     sum(lost(usual, x) for x in gradients.values()))  # fmt: skip
    smaller = alike / sum(found[name].nbytes(x.shape) for name, x in gradients.items())
    assert sum(lost(found[name], x) for name, x in gradients.items()) <= errors * (
        1 + 1e-6
    )
    assert smaller >= (
        1.3 if word.split(":")[0] in ("topk", "powersgd", "randk") else 1.0
    )


def test_candidates_are_of_the_same_kind() -> None:
    ranks = [c.rank for c in alternatives_of(build_compressor("powersgd:4"), (64, 32))]  # type: ignore[attr-defined]
    assert sorted(ranks) == [2, 3, 4, 5, 6, 7, 8]
    assert alternatives_of(build_compressor("powersgd:4"), (64,)) == [
        build_compressor("powersgd:4")
    ]
    shares = [c.share for c in alternatives_of(build_compressor("topk:0.5"), (64, 32))]
    assert (
        max(shares) == 1.0 and min(shares) == 0.0625 and len(shares) == len(set(shares))
    )
