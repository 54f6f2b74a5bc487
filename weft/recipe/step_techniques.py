"""Which techniques a recipe asks for to fill phases of the training step (:mod:`weft.train.phases`).

A section says in ``asks`` which of its settings ask for a technique, unless they have their defaults. ``[[phases]]``
names those of plugins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Any, NamedTuple

from weft.layout.layout import AskedLayout
from weft.plugins import call
from weft.recipe.memory_section import AskedMemory
from weft.recipe.optimizer import Optimizer
from weft.recipe.resilience import Resilience
from weft.recipe.sync import Sync
from weft.refusal import Conflict
from weft.registry import Registered, find


class AskedStep(AskedLayout, AskedMemory):
    """Settings of a recipe from which :func:`asked_techniques` finds the techniques that change a training step.

    The attributes are the recipe's sections of the same names.
    """

    optimizer: Optimizer
    resilience: Resilience
    sync: Sync
    phases: tuple[Any, ...]


class AskedTechnique(NamedTuple):
    """A technique that changes the training step, and that a recipe asks for.

    ``declared``: its entry in the registry. ``technique``: the :class:`weft.train.step_technique.StepTechnique`.
    """

    declared: Registered
    technique: Any


def asked_techniques(asked: AskedStep) -> Iterator[AskedTechnique]:
    """Yield the techniques of the training step that the settings in ``asked`` ask for.

    Sections that are not known yet, and so are no attributes of ``asked``, ask for no technique.
    """
    known = vars(asked)
    for key, section in known.items():
        for setting, name in getattr(section, "asks", {}).items():
            value = getattr(section, setting)
            if value != type(section).model_fields[setting].default:
                yield _asked(name, f"{key}.{setting} = {value!r}")
    if {"layout", "sync"} <= known.keys() and asked.layout.island > 1:
        name = "summed-islands" if asked.sync.of_gradients else "separate-islands"
        yield _asked(name, f"layout.island = {asked.layout.island}")
    for use in known.get("phases", ()):
        declared = find("phases", use.name)
        yield AskedTechnique(declared, call(declared, use.settings)())


def _asked(name: str, setting: str) -> AskedTechnique:
    declared = find("phases", name, setting)
    return AskedTechnique(declared, declared.implementation())


def refuse_filled_twice(asked: AskedStep, techniques: Iterable[AskedTechnique]) -> None:
    """Raise :class:`Conflict` if two of these ``techniques`` implement the same phase of a step.

    ``asked``: the settings of the recipe, which the error line quotes.
    """
    for (first, a), (second, b) in combinations(techniques, 2):
        if shared := a.fills & b.fills:
            line = (
                f"{a.does}, and {b.does}: both fill a step's {shared}; leave one of them out"
                f"{a.instead}{b.instead}"
            )
            names = f"{first.name} with {second.name}"
            raise Conflict(line.format(asked), names)
