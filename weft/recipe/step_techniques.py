"""Techniques that fill phases of the training step, and how a recipe asks for each of them.

A step has phases: gradients, agree, update, and what happens after it. One technique fills a phase; the plain step
fills the others. So two techniques that fill one phase exclude each other, and no rule need say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Flag, auto
from itertools import combinations

from weft.layout.layout import AskedLayout
from weft.recipe.memory_section import AskedMemory
from weft.recipe.optimizer import Optimizer
from weft.recipe.resilience import Resilience
from weft.recipe.sync import Sync
from weft.refusal import Conflict


class Phase(Flag):
    """A part of a training step; its name in lower case is the method that fills it."""

    #: Passes over the batches leave gradients on this rank.
    GRADIENTS = auto()
    #: Ranks combine their gradients, and learn loss, norm and whether a rank wishes to stop.
    AGREE = auto()
    #: Parameters and optimizer state change.
    UPDATE = auto()
    #: Something happens between this step and the next one.
    AFTER = auto()

    def __str__(self) -> str:
        names = [(phase.name or "").lower() for phase in self]
        return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


STEP = Phase.GRADIENTS | Phase.AGREE | Phase.UPDATE


class AskedStep(AskedLayout, AskedMemory):
    """Settings that may ask for a technique of the step."""

    optimizer: Optimizer
    resilience: Resilience
    sync: Sync


@dataclass(frozen=True)
class StepTechnique:
    """A technique that fills phases of a step.

    ``asked`` says whether it is asked for, and ``does`` what it then does (``{0}`` is the settings). Both read only the
    sections that ``needs`` names. ``fill`` of ``module`` returns an object that has the methods of the phases, or None
    where there is nothing for it to do on this mesh.
    ``instead``: what else to do than to leave it out.
    """

    name: str
    fills: Phase
    needs: str
    asked: Callable[[AskedStep], bool]
    does: str
    module: str
    instead: str = ""


STEP_TECHNIQUES = (
    StepTechnique(
        "zeroth order",
        STEP,
        "optimizer",
        lambda a: a.optimizer.estimate == "zeroth-order",
        "optimizer.estimate = 'zeroth-order' estimates gradients from losses",
        "weft.train.zeroth",
    ),
    StepTechnique(
        "post-validation",
        STEP,
        "optimizer",
        lambda a: a.optimizer.post_validation,
        "optimizer.post_validation updates before the norm is known",
        "weft.train.post_validation",
    ),
    StepTechnique(
        "update in backward",
        STEP,
        "optimizer",
        lambda a: a.optimizer.in_backward,
        "optimizer.in_backward updates each unit within backward",
        "weft.train.in_backward",
    ),
    StepTechnique(
        "speculation",
        STEP,
        "memory",
        lambda a: a.memory.speculate != "none",
        "memory.speculate = {0.memory.speculate!r} updates units during backward and may undo that",
        "weft.train.speculation",
    ),
    StepTechnique(
        "alternating updates",
        Phase.UPDATE,
        "memory",
        lambda a: a.memory.alternate != 0,
        "memory.alternate = {0.memory.alternate!r} shares the update of reduced gradients with the device",
        "weft.train.alternation",
    ),
    StepTechnique(
        "gradient code",
        Phase.GRADIENTS | Phase.AGREE,
        "resilience",
        lambda a: bool(a.resilience.code),
        "resilience.code = {0.resilience.code!r} decodes the sum of all gradients from the first answers",
        "weft.train.coding",
    ),
    StepTechnique(
        "aggregation of replicas",
        Phase.AGREE,
        "resilience",
        lambda a: a.resilience.aggregate != "mean",
        "resilience.aggregate = {0.resilience.aggregate!r} sees the replicas' gradients one by one",
        "weft.train.voting",
    ),
    StepTechnique(
        "islands that agree in every step",
        Phase.AGREE,
        "layout sync",
        lambda a: a.layout.island > 1 and a.sync.of_gradients,
        "islands with sync.every = 1 sum gradients between backward and update",
        "weft.train.summed_islands",
        ", or set sync.every above 1",
    ),
    StepTechnique(
        "islands that agree between steps",
        Phase.AFTER,
        "layout sync",
        lambda a: a.layout.island > 1 and not a.sync.of_gradients,
        "islands exchange parameters between steps",
        "weft.train.islands",
    ),
)


def asked_techniques(asked: AskedStep) -> list[StepTechnique]:
    """The techniques that are asked for, of those for which ``asked`` knows enough."""
    return [
        technique
        for technique in STEP_TECHNIQUES
        if set(technique.needs.split()) <= vars(asked).keys() and technique.asked(asked)
    ]


def refuse_filled_twice(asked: AskedStep, techniques: Iterable[StepTechnique]) -> None:
    """Raise :class:`Conflict` if two of these ``techniques`` fill one phase of a step."""
    for a, b in combinations(techniques, 2):
        if shared := a.fills & b.fills:
            line = (
                f"{a.does}, and {b.does}: both fill a step's {shared}; leave one of them out"
                f"{a.instead}{b.instead}"
            )
            raise Conflict(line.format(asked), f"{a.name} with {b.name}")
