"""Evolutionary search of expressions: random changes, kept where a judge finds them better.

Genetic programming (Koza 1992) with tournaments, over the trees of :mod:`weft.search.policy_language`. The best ones
stay, and of equals the shorter one is better, so that finds can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import NamedTuple

from weft.search.policy_language import OPERATIONS, Expression, feature, number

#: The most nodes of an expression in the search.
MOST = 31
#: Share of a generation that stays as it is, of changes that join two expressions, and of short random expressions in
#: place of a change: they bring what no ancestor of the others had.
STAY, JOIN, FRESH = 0.15, 0.3, 0.1
#: Expressions of which a tournament picks the best.
TOURNAMENT = 4
#: The most draws until an expression comes that has not been judged yet.
DRAWS = 20
#: Expressions that lead a generation.
LEADING = 6


class JudgedExpression(NamedTuple):
    """An expression with its cost; a smaller cost is better. ``source``: how the expression came about, in a word, such
    as a seed or a mutation.
    """

    cost: float
    expression: Expression
    source: str

    @property
    def rank(self) -> tuple[float, str]:
        """Sort key that puts the best expression first: by its cost, and of equal cost by the size and the text of the
        expression.
        """
        return self.cost, f"{self.expression.size:04d} {self.expression}"


class SearchGeneration(NamedTuple):
    """A generation of the evolution. ``number``: number of the generation, from 0; ``leading``: the best expressions so
    far, all different, the best first; ``judged``: number of expressions judged so far.
    """

    number: int
    leading: Sequence[JudgedExpression]
    judged: int

    @property
    def best(self) -> JudgedExpression:
        """The best expression so far."""
        return self.leading[0]


def evolve(
    seeds: Sequence[Expression],
    features: Mapping[str, Sequence[float]],
    cost: Callable[[Expression], float],
    generations: int,
    population: int,
    random: Random,
    propose: Callable[
        [Sequence[JudgedExpression]], Sequence[Expression]
    ] = lambda best: (),
) -> Iterator[SearchGeneration]:
    """Search for an expression of low cost by evolution, and yield every generation with the best expressions so far.
    ``seeds``: expressions to begin with; they are judged first, and stay until better ones replace them. ``features``:
    for each name that expressions may use, some of the values that it takes. ``cost``: function that judges an
    expression. ``generations``: number of generations; ``population``: number of expressions in each. ``random``:
    source of random choices. ``propose``: function that returns further expressions, given the best so far; called once
    in every generation.
    """
    breeder = _Breeder(features, cost, random)
    living = [breeder.judged(each, "seed") for each in seeds]
    while len(living) < population:
        living.append(breeder.new(partial(breeder.newcomer, living)))
    living.sort(key=lambda each: each.rank)
    yield SearchGeneration(0, _distinct(living)[:LEADING], len(breeder.known))
    for generation in range(1, generations):
        proposed = [breeder.judged(each, "model") for each in propose(living[:4])]
        stay = _distinct(living)[: max(2, round(STAY * population))]
        children, parents = [*stay, *proposed], living
        while len(children) < population:
            children.append(breeder.new(partial(breeder.child, parents)))
        living = sorted(children, key=lambda each: each.rank)
        leading = _distinct(living)[:LEADING]
        yield SearchGeneration(generation, leading, len(breeder.known))


@dataclass
class _Breeder:
    """Makes expressions and judges them. ``known``: costs of all that were judged, by their texts."""

    features: Mapping[str, Sequence[float]]
    cost: Callable[[Expression], float]
    random: Random
    known: dict[str, float] = field(default_factory=dict)

    def judged(self, expression: Expression, source: str) -> JudgedExpression:
        text = str(expression)
        if text not in self.known:
            self.known[text] = self.cost(expression)
        return JudgedExpression(self.known[text], expression, source)

    def new(self, draw: Callable[[], Expression]) -> JudgedExpression:
        """Judge what ``draw`` returns, of some draws the first that is new: others repeat what is known."""
        for _ in range(DRAWS):
            drawn = draw()
            if str(drawn) not in self.known:
                break
        return self.judged(drawn, "change")

    def fresh(self, living: Sequence[JudgedExpression]) -> Expression:
        """Return a short random expression, half of the time of features that living ones use."""
        if self.random.random() < 0.5:
            return drawn_expression(self.features, 1, self.random)
        used = {name for each in living for name in each.expression.names}
        return _sum_of_two(self.features, sorted(used) or [*self.features], self.random)

    def newcomer(self, living: Sequence[JudgedExpression]) -> Expression:
        """Return a short random expression, or a change of one that lives."""
        if self.random.random() < 0.5:
            return self.fresh(living)
        parent = self.random.choice(living).expression
        return mutated(parent, self.features, self.random)

    def child(self, living: Sequence[JudgedExpression]) -> Expression:
        """Return a change of a good expression, two good ones joined, or a short random one."""
        if self.random.random() < FRESH:
            return self.fresh(living)
        parent = _winner(living, self.random)
        if self.random.random() < JOIN:
            return joined(parent, _winner(living, self.random), self.random)
        return mutated(parent, self.features, self.random)


def _distinct(living: Sequence[JudgedExpression]) -> list[JudgedExpression]:
    return [*{str(each.expression): each for each in living}.values()]


def _winner(living: Sequence[JudgedExpression], random: Random) -> Expression:
    """Return the best of a few expressions that are drawn."""
    drawn = [random.choice(living) for _ in range(TOURNAMENT)]
    return min(drawn, key=lambda each: each.rank).expression


def drawn_expression(
    features: Mapping[str, Sequence[float]], depth: int, random: Random
) -> Expression:
    """Draw a random expression with at most ``depth`` levels below its root. ``features``: for each name that the
    expression may use, some of the values that it takes.
    """
    if depth == 0 or random.random() < 0.25:
        if random.random() < 0.7:
            return feature(random.choice([*features]))
        return _drawn_number(features, random)
    name = random.choice([*OPERATIONS, "+", "-", "*", "/"])
    parts = (
        drawn_expression(features, depth - 1, random)
        for _ in range(OPERATIONS[name].parts)
    )
    return Expression(name, tuple(parts))


def _sum_of_two(
    features: Mapping[str, Sequence[float]], names: Sequence[str], random: Random
) -> Expression:
    """Draw a sum or difference of two of the features ``names``, each divided by one of its values: of features of
    different sizes, the larger one alone would decide.
    """

    def scaled(name: str) -> Expression:
        size = abs(random.choice(features[name]))
        return Expression("/", (feature(name), number(size or 1.0)))

    sign = random.choice(("+", "-"))
    return Expression(
        sign, (scaled(random.choice(names)), scaled(random.choice(names)))
    )


def _drawn_number(
    features: Mapping[str, Sequence[float]], random: Random
) -> Expression:
    """Draw a number: one that a feature takes, or one of any size, as features differ by orders of magnitude."""
    if random.random() < 0.5:
        return number(random.choice(features[random.choice([*features])]))
    return number(float(f"{10 ** random.uniform(-4, 4):.2g}"))


def _changed_number(
    value: float, features: Mapping[str, Sequence[float]], random: Random
) -> Expression:
    """Return another number in place of ``value``: mostly one of a similar size."""
    kind = random.random()
    if kind < 0.6:
        return number(value * random.lognormvariate(0, 0.7))
    if kind < 0.8:
        return number(value + random.gauss(0, 0.05))
    return number(-value) if kind < 0.9 else _drawn_number(features, random)


def _divided(
    old: Expression, features: Mapping[str, Sequence[float]], random: Random
) -> Expression:
    """Return an expression that is ``old`` only on one side of a value of some feature, and another elsewhere."""
    name = random.choice([*features])
    border = number(random.choice(features[name]))
    sides = [old, drawn_expression(features, 1, random)]
    random.shuffle(sides)
    return Expression("if", (Expression("<", (feature(name), border)), *sides))


def mutated(
    parent: Expression, features: Mapping[str, Sequence[float]], random: Random
) -> Expression:
    """Return ``parent`` with one random change: a part is replaced, wrapped in an operation, left out or made to hold
    on one side of a border only, or a number is changed. ``features``: for each name that the result may use, some of
    the values that it takes.
    """
    for _ in range(20):
        at = random.randrange(parent.size)
        old = _part(parent, at)
        kind = random.random()
        if old.operation == "number" and kind < 0.7:
            new = _changed_number(old.value, features, random)
        elif kind < 0.3:
            new = drawn_expression(features, 2, random)
        elif kind < 0.55:
            name = random.choice(("+", "-", "*", "/", "min", "max"))
            other = drawn_expression(features, 1, random)
            new = Expression(
                name, (old, other) if random.random() < 0.5 else (other, old)
            )
        elif kind < 0.67:
            new = _divided(old, features, random)
        elif kind < 0.82 and old.parts:
            new = random.choice(old.parts)
        elif old.operation == "feature":
            new = feature(random.choice([*features]))
        else:
            new = Expression(random.choice(("neg", "sqrt", "log1p")), (old,))
        child = _replaced(parent, at, new)
        if child.size <= MOST and child != parent:
            return child
    return drawn_expression(features, 3, random)


def joined(first: Expression, second: Expression, random: Random) -> Expression:
    """Return a new expression: ``first``, with a random part replaced by a random part of ``second``."""
    for _ in range(20):
        part = _part(second, random.randrange(second.size))
        child = _replaced(first, random.randrange(first.size), part)
        if child.size <= MOST:
            return child
    return first


def _part(whole: Expression, at: int) -> Expression:
    """Return the part of ``whole`` with the index ``at``, counted from the root."""
    if at == 0:
        return whole
    at -= 1
    for part in whole.parts:
        if at < part.size:
            return _part(part, at)
        at -= part.size
    raise IndexError(at)


def _replaced(whole: Expression, at: int, new: Expression) -> Expression:
    """Return ``whole`` with its part of index ``at`` replaced by ``new``."""
    if at == 0:
        return new
    at -= 1
    parts = []
    for part in whole.parts:
        inside = 0 <= at < part.size
        parts.append(_replaced(part, at, new) if inside else part)
        at -= part.size
    return Expression(whole.operation, tuple(parts), whole.value, whole.name)
