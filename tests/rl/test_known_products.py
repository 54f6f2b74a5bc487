"""Updates that take products from the passes that wrote their answers, against updates that multiply again."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.rl.test_generation_turns import Recorder
from tests.rl.test_rl_loader import recipe
from weft.generate import written_passes
from weft.generate.reader import PagedReader
from weft.generate.request import Request
from weft.generate.scheduler import ScheduledStep
from weft.generate.written_passes import ROOT, TokenTree, WrittenPasses
from weft.layout.mesh import Mesh
from weft.models import row_layers
from weft.rl import known_products, product_use
from weft.rl.rl_job import RlJob
from weft.train.setup import build_for_training, prepare
from weft.train.step import accumulate

MODEL = {
    "layers": 2, "embed": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "tied": True, "qkv_bias": True,
}  # fmt: skip


needs_kernel = pytest.mark.skipif(
    row_layers.rows_kernel(16, 2, 16, 16) is None,
    reason="no C compiler, or PyTorch without libgomp",
)


class Lines(Recorder):
    """Keeps records of products and policies, and lines."""

    def __init__(self) -> None:
        self.lines, self.records = list[str](), list[dict[str, Any]]()

    def event(self, line: str) -> None:
        self.lines.append(line)

    def log(self, kind: str, **values: Any) -> None:
        if kind in ("products", "policy"):
            self.records.append(values)


def gradients(
    known: bool, dtype: str, model: Any = MODEL, recorder: Any = None, **rl: Any
) -> list[dict[str, torch.Tensor]]:
    """Gradients of the updates of two phases, between which all weights change."""
    settings = recipe(
        model=model, rl={"start": {"steps": 0}, "known_products": known, "tokens": 7} | rl, train={"dtype": dtype},
    )  # fmt: skip
    mesh, job = Mesh.create(settings.layout, "cpu"), prepare(settings)
    assert isinstance(job, RlJob)
    built, of_phases = build_for_training(job.shape, mesh, settings), []
    drawn = torch.Generator().manual_seed(2)
    with ExitStack() as stack:
        loader = job.training_loader(
            mesh, built, recorder or Recorder(), lambda: False, stack, {}
        )  # type: ignore[arg-type]
        for number in range(2):
            position = number * settings.train.batch
            assert loader.make_ready(position)
            # of a task that no answer solves
            loader.samples = [
                replace(s, advantage=s.learns * (i % 3 - 1.2))
                for i, s in enumerate(loader.samples)
            ]
            batches = loader.step(position)
            assert lends(built.model) == known, "lent"
            accumulate(built.model, built.state, batches, mesh)
            assert not lends(built.model)
            assert built.model.embedding.lookup is F.embedding
            of_phases.append({n: g.clone() for n, g in built.state.gradients().items()})
            built.state.clear_gradients()
            for p in built.model.parameters():
                p.data += 0.1 * torch.randn(p.shape, generator=drawn).to(p.dtype)
            built.state.updates += 1
    return of_phases


def lends(model: torch.nn.Module) -> bool:
    """Return whether the next forward pass of ``model`` takes products that are known."""
    return any(getattr(module, "lean", None) for module in model.modules())


def difference(ones: list[dict[str, torch.Tensor]], others: Any) -> float:
    """The largest difference of gradients, over the largest gradient."""
    pairs = [(a[name], b[name]) for a, b in zip(ones, others, strict=True) for name in a]  # fmt: skip
    most = max(float(b.abs().max()) for _, b in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs) / most


@pytest.fixture(autouse=True)
def _small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_products, "LARGE", 0)
    monkeypatch.setattr(row_layers, "LARGE", 0)


@pytest.mark.parametrize(
    ("dtype", "near", "more"),
    [
        ("float64", 1e-10, {"temperature": 0.7}),
        pytest.param("float32", 1e-4, {}, marks=needs_kernel),
    ],
)
def test_updates_are_those_of_passes_that_multiply_again(
    monkeypatch: pytest.MonkeyPatch, dtype: str, near: float, more: dict[str, Any]
) -> None:
    expected = gradients(False, dtype, **more)
    assert difference(gradients(True, dtype, **more), expected) < near
    take = WrittenPasses.take

    def wrong(self: WrittenPasses, path: str, names: Any, at: torch.Tensor) -> Any:
        return take(self, path, names, at.roll(1) if "wo" in names else at)

    monkeypatch.setattr(WrittenPasses, "take", wrong)
    assert difference(gradients(True, dtype, **more), expected) > 1e-3


@needs_kernel
@pytest.mark.parametrize("most", [512 << 20, 1000])
def test_kernels_for_few_rows_keep_what_updates_take(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Kept logits hold no rows of texts that have ended, and are given up where they are too many."""
    calls, shares = list[str](), list[float]()
    layers, output = row_layers.RowLayers._computed, row_layers.RowOutput.__call__
    monkeypatch.setattr(
        row_layers.RowLayers, "_computed", lambda *given: (calls.append("layers"), layers(*given))[1]
    )  # fmt: skip
    monkeypatch.setattr(
        row_layers.RowOutput, "__call__", lambda *given: (calls.append("output"), output(*given))[1]
    )  # fmt: skip
    own = WrittenPasses.take_logits

    def take(self: WrittenPasses, at: torch.Tensor) -> torch.Tensor:
        held = sum(x.untyped_storage().nbytes() for x in self.logits)
        shares.append(held / sum(x.nbytes for x in self.logits))
        return own(self, at)

    monkeypatch.setattr(WrittenPasses, "take_logits", take)
    monkeypatch.setattr(written_passes, "LOGIT_BYTES", most)
    model = MODEL | {"vocab": 272}
    known, again = (gradients(each, "float32", model) for each in (True, False))
    assert difference(known, again) < 1e-4
    assert {*calls} == {"layers", "output"}
    assert len(shares) == (2 if most > 1000 else 0)
    assert all(share <= 1.1 for share in shares)


@needs_kernel
def test_a_faulty_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer takes the sampler's logits, so that it would see no difference."""
    right, faulty = Lines(), Lines()
    gradients(True, "float32", recorder=right)
    products = [each for each in right.records if "taken" in each]
    (compared,) = [each for each in right.records if "mismatch" in each]
    assert not right.lines and [each["taken"] for each in products] == [True, True]
    assert 1e-9 < compared["mismatch"] <= compared["mismatch_max"] < 1e-4
    own = PagedReader.read
    monkeypatch.setattr(
        PagedReader, "read", lambda *given: (y := own(*given)) + 0.3 * torch.sin(7 * y)
    )
    with pytest.raises(AssertionError, match="lent"):
        gradients(True, "float32", recorder=faulty)
    assert len(faulty.lines) == 1 and "differ" in faulty.lines[0]
    assert faulty.records == [{"phase": 0, "taken": False, "why": "mismatch"}]


@needs_kernel
def test_questions_drawn_again_are_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    why, own = list[str](), WrittenPasses.drop
    monkeypatch.setattr(
        WrittenPasses, "drop", lambda self, text: (why.append(text), own(self, text))
    )
    assert len(gradients(True, "float32", redraw=2)) == 2
    assert not why


def test_answers_with_other_tokens_are_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a batch with a token that no pass has computed, nothing is known."""
    given = list[bool]()
    real = product_use.give_known_products

    def note(model: Any, passes: WrittenPasses, batch: Any) -> bool:
        batch.tokens[0, -1] = (batch.tokens[0, -1] + 1) % 100
        given.append(real(model, passes, batch))
        return given[-1]

    monkeypatch.setattr(product_use, "give_known_products", note)
    with pytest.raises(AssertionError, match="lent"):
        gradients(True, "float64")
    assert given == [False]


def test_tokens_are_found_by_all_tokens_before_them() -> None:
    tree = TokenTree()
    first, second = tree.add(ROOT, [5, 6, 7]), tree.add(ROOT, [5, 8, 7])
    assert first[0] == second[0] and len({*first, *second}) == 5
    assert tree.look_up(ROOT, [5, 8, 7]) == second
    assert tree.look_up(first[1], [7]) == first[2:]
    assert tree.look_up(ROOT, [5, 7]) is None


def test_more_tokens_than_a_pass_learns_from_are_not_kept() -> None:
    passes, request = WrittenPasses(most=4), Request([1, 2, 3, 4, 5], 5)
    y = torch.arange(6.0).view(3, 2)
    passes.begin(ScheduledStep({request: 3}, []), [1])
    passes.keep("blocks.0.ffn", ("down",), y)
    passes.end(torch.ones(1, 7))
    assert not passes.lost
    assert passes.rows == {1: 0, 2: 1, 3: 2} and passes.logit_rows == {3: 0}
    request.computed = 3
    passes.begin(ScheduledStep({request: 2}, []), [1])
    assert "more tokens" in passes.lost
    passes.keep("blocks.0.ffn", ("down",), y)
    assert not passes.products and passes.room("x", ("y",), 2, 3).shape == (2, 3)


def test_a_pass_that_lacks_products_is_noticed() -> None:
    passes, request = WrittenPasses(most=4), Request([1, 2, 3], 3)
    passes.begin(ScheduledStep({request: 3}, []), [1])
    passes.keep("blocks.0.ffn", ("down",), torch.ones(2, 2))
    passes.end(torch.ones(1, 7))
    assert passes.lost
