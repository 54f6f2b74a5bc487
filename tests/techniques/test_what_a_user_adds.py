"""A technique of a user's, outside of the package, does all that Weft's own of its kind do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.cases import write_corpus
from tests.sync.test_islands import in_threads, tree
from weft.data.batch import Pairs
from weft.errors import UsageError
from weft.layout.mesh import Mesh
from weft.models.pair_loss import PairLoss
from weft.models.preference import needs_reference, objective
from weft.recipe import Recipe, Resilience, build_recipe
from weft.registry import register
from weft.section import Section
from weft.sync.aggregator import Aggregator
from weft.sync.coded import Arrived, Code, CodedTask, Result, code_of
from weft.sync.compressor import Compressor, Payload
from weft.sync.simulated_round import Round
from weft.sync.sync_method import Slots, SyncMethod
from weft.techniques.phases.aggregation.votes import Voting
from weft.train.build_step import build_step
from weft.train.phases import Phase
from weft.train.setup import build_for_training
from weft.train.step import PlainStep, StepContext
from weft.train.step_technique import StepTechnique
from weft.train.step_values import Agreed, StepInput, StepResult

pytestmark = pytest.mark.usefixtures("own_techniques")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


class PartWay(Section):
    """How far islands go."""

    share: float = 0.5


def test_a_sync_method(corpus: str) -> None:
    """Islands that go part of the way to the mean, in fragments whose answers are late: as one process simulates."""

    @register("sync", "part-way", settings=PartWay, draws={"share": (0.0, 0.5)})
    class GoPartWay(SyncMethod):
        """Islands go a share of the way to the mean of all."""

        in_fragments = True

        def applied(
            self, theta: torch.Tensor, slots: Slots, answer: torch.Tensor, islands: int
        ) -> torch.Tensor:
            slots["anchor"].sub_(answer, alpha=self.settings.own(PartWay).share)
            return slots["anchor"]

        def simulate(self, at: Round) -> None:
            if at.is_due:
                at.past.append(at.mean(at.differences()))
            if at.past and at.step % at.how.every == at.how.delay:
                mean = at.past.pop()
                for one in at.ones.values():
                    one.kept["anchor"] -= self.settings.own(PartWay).share * mean
                    one.now.copy_(one.kept["anchor"])

    sync = {"every": 2, "update": "part-way", "share": 0.25, "fragments": 2, "delay": 1}
    values = tree(corpus, "island=2", train__steps=20) | {"sync": sync}
    assert in_threads(values, 5).ok
    refused = {"update": "part-way", "partner": "ring"}
    with pytest.raises(UsageError, match="it goes with 'all'"):
        in_threads(values | {"sync": refused}, 1)


def test_a_sync_method_that_nobody_simulates(corpus: str) -> None:
    @register("sync", "stay")
    class Stay(SyncMethod):
        """Islands stay where they are."""

        def applied(
            self, theta: torch.Tensor, slots: Slots, answer: torch.Tensor, islands: int
        ) -> torch.Tensor:
            return theta

    values = tree(corpus, "island=2") | {"sync": {"every": 2, "update": "stay"}}
    with pytest.raises(UsageError, match="there is nothing to compare"):
        in_threads(values, 4)


def test_a_compressor(corpus: str) -> None:
    """A word of a user's, with an argument, as messages of islands and with what is wrong with it in one line."""

    @register("compressor", "times")
    @dataclass(frozen=True)
    class Times(Compressor):
        """Sends every element so many times as large."""

        by: float = 2.0
        linear = False
        exact = True

        @classmethod
        def of_word(cls, word: str, argument: str | None) -> Times:
            if argument not in ("2", "4"):
                raise UsageError(f"compressor {word!r} needs 2 or 4, as in 'times:4'")
            return cls(by=float(argument))

        def encode(
            self, x: torch.Tensor, seed: int, warm: torch.Tensor | None = None
        ) -> Payload:
            return [x * self.by]

        def decode(
            self, payload: Payload, shape: Sequence[int], seed: int
        ) -> torch.Tensor:
            return self._checked(payload, shape)[0] / self.by

    sync = {"every": 2, "update": "nesterov", "compress": "times:4"}
    values = tree(corpus, "island=2", train__steps=20) | {"sync": sync}
    assert in_threads(values, 4).ok
    for word, said in ("times:3", "needs 2 or 4"), ("tomes:4", "did you mean 'times'"):
        with pytest.raises(UsageError, match=said):
            in_threads(values | {"sync": sync | {"compress": word}}, 1)


def test_an_aggregator(corpus: str) -> None:
    """Of a user's: what it makes of replicas, one of which lies, and how many replicas it needs."""

    @register("aggregator", "middle")
    class Middle(Aggregator):
        """In each coordinate the median."""

        def combined(
            self, chunks: torch.Tensor, gram: torch.Tensor, faulty: int
        ) -> torch.Tensor:
            return chunks.median(dim=0).values

    asked = {"aggregate": "middle", "faulty": 1}
    with pytest.raises(UsageError, match="needs 3 replicas, and dp=2"):
        build_recipe(tree(corpus, "dp=2") | {"resilience": asked})
    recipe = build_recipe(tree(corpus, "dp=3") | {"resilience": asked})
    context = Mock(spec=StepContext)
    voting = Voting(context, recipe.resilience)
    votes = torch.tensor([[1.0, 2.0], [1.5, 1e9], [2.0, 3.0]])
    voted = voting.rule.combined(votes, votes @ votes.T, 1)
    assert voted.tolist() == [1.5, 3.0]


def test_a_gradient_code(corpus: str) -> None:
    """Of a user's: every replica computes all, so that the first answer is enough."""

    class Everything(Code):
        parts, delay = 1, 0

        def parts_of(self, rank: int) -> tuple[int, ...]:
            return (0,)

        def tasks(self, rank: int, number: int, arrived: Arrived) -> list[CodedTask]:
            return [CodedTask(number, (0,), (1.0,))] * (number < self.jobs)

        def decoding(self, job: int, arrived: Arrived) -> dict[Result, float] | None:
            came = sorted(arrived[job]) if job < len(arrived) else []
            return {Result(came[0], job): 1.0} if came else None

    @register("code", "all-of-it")
    def everything(settings: Resilience, ranks: int) -> Everything:
        """Of all replicas all but the first may be late."""
        return Everything(ranks, settings.stragglers, settings.jobs)

    asked = {"code": "all-of-it", "stragglers": 1}
    recipe = build_recipe(tree(corpus, "dp=2") | {"resilience": asked})
    code = code_of(recipe.resilience, 2)
    assert code is not None and code.parts == 1
    assert code.decoding(0, [{1}]) == {Result(1, 0): 1.0}


def test_a_loss_of_pairs() -> None:
    """Of a user's, by settings of its own, without a reference; what it has no use for is refused."""

    class Wish(Section):
        ahead: float = 1.0

    @register("pair-loss", "squared", settings=Wish)
    class Squared(PairLoss):
        """The squared distance of a gap from what it should be."""

        has_reference = smooths = False

        def of(self, gap: torch.Tensor, margin: torch.Tensor) -> torch.Tensor:
            return (gap - self.settings.own(Wish).ahead).square()

    pairs = {"sources": [{"kind": "preference", "path": "pairs.jsonl"}]}
    asked = {"kind": "squared", "ahead": 2.0}
    loss = build_recipe({"loss": asked, "data": pairs}).loss
    of = objective(loss)
    assert of is not None and loss.of_pairs and not needs_reference(loss)
    no = np.zeros(1)
    sums = torch.tensor([[5.0, 2.0]], dtype=torch.float64)
    given = Mock(spec=Pairs, margin=no, reference=None)
    assert of(sums, torch.ones(1, 2), given).tolist() == [1.0]
    for wrong, said in (
        ({"label_smoothing": 0.1}, "loss.label_smoothing does nothing for"),
        ({"reference": "x"}, "loss.reference, but loss.kind = 'squared' has none"),
        ({"kind": "square"}, "did you mean 'squared'"),
    ):
        with pytest.raises(UsageError, match=said):
            build_recipe({"loss": asked | wrong, "data": pairs})


def test_a_technique_of_the_step(corpus: str) -> None:
    """It fills its phases and no other, excludes what fills one of them, and Weft's own are not named so."""

    class Slower(PlainStep):
        def __init__(self, context: StepContext, share: float) -> None:
            super().__init__(context)
            self.share = share

        def update(self, given: StepInput, agreed: Agreed) -> list[StepResult]:
            return super().update(given._replace(lr=given.lr * self.share), agreed)

    @register("phases", "slower")
    class SlowerTechnique(StepTechnique):
        """Updates at a share of the learning rate."""

        fills = Phase.UPDATE
        does = "phases = 'slower' updates at a share of the rate"

        def __init__(self, share: float) -> None:
            self.share = share

        def fill(self, context: StepContext, recipe: Recipe) -> Slower:
            return Slower(context, self.share)

    named = {"phases": [{"name": "slower", "settings": {"share": 0.5}}]}
    recipe = build_recipe(tree(corpus, "") | named)
    shape = recipe.model.model_copy(update={"vocab": 257})
    mesh = Mesh.single()
    step = build_step(
        StepContext(*build_for_training(shape, mesh, recipe), mesh), recipe
    )
    assert isinstance(step.update, Slower) and step.update.share == 0.5
    assert type(step.agree) is type(step.gradients) is PlainStep

    for also, line in (
        ({"memory": {"weights": "host", "alternate": 0.5}}, "share of the rate: both fill a step's update"),
        ({"phases": [{"name": "slower", "settings": {"shares": 1}}]}, "cannot be called with"),
        ({"phases": ["in-backward"]}, "is Weft's own, which other settings ask for"),
        ({"phases": ["slow"]}, "did you mean 'slower'"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=line):
            build_recipe(tree(corpus, "") | named | also)
