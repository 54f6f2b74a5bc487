"""Evolutionary search of expressions: random changes, kept where a judge finds them better.

Genetic programming (Koza 1992) with tournaments, over the trees of :mod:`weft.search.policy_language`. The best ones
stay, and of equals the shorter one is better, so that finds can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

from weft.search.policy_language import OPERATIONS, Expression, feature, number

#: The most nodes of an expression in the search.
MOST = 31
#: Share of a generation that stays as it is, and of changes that join two expressions.
STAY, JOIN = 0.15, 0.3
#: Expressions of which a tournament picks the best.
TOURNAMENT = 4


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
    """A generation of the evolution. ``number``: number of the generation, from 0; ``best``: the best expression so
    far; ``judged``: number of expressions judged so far.
    """

    number: int
    best: JudgedExpression
    judged: int


def evolve(
    seeds: Sequence[Expression],
    features: Sequence[str],
    cost: Callable[[Expression], float],
    generations: int,
    population: int,
    random: Random,
    propose: Callable[
        [Sequence[JudgedExpression]], Sequence[Expression]
    ] = lambda best: (),
) -> Iterator[SearchGeneration]:
    """Search for an expression of low cost by evolution, and yield every generation with the best expression so far.
    ``seeds``: expressions to begin with; they are judged first, and stay until better ones replace them. ``features``:
    names that expressions may use. ``cost``: function that judges an expression. ``generations``: number of
    generations; ``population``: number of expressions in each. ``random``: source of random choices. ``propose``:
    function that returns further expressions, given the best so far; called once in every generation.
    """
    known: dict[str, float] = {}

    def judge(expression: Expression, source: str) -> JudgedExpression:
        text = str(expression)
        if text not in known:
            known[text] = cost(expression)
        return JudgedExpression(known[text], expression, source)

    living = [judge(each, "seed") for each in seeds]
    while len(living) < population:
        parent = random.choice(living).expression
        changed = mutated(parent, features, random)
        living.append(judge(changed, "change"))
    living.sort(key=lambda each: each.rank)
    yield SearchGeneration(0, living[0], len(known))
    for generation in range(1, generations):
        proposed = [judge(each, "model") for each in propose(living[:4])]
        stay = _distinct(living)[: max(2, round(STAY * population))]
        children = [*stay, *proposed]
        while len(children) < population:
            parent = _winner(living, random)
            if random.random() < JOIN:
                child = joined(parent, _winner(living, random), random)
            else:
                child = mutated(parent, features, random)
            children.append(judge(child, "change"))
        living = sorted(children, key=lambda each: each.rank)
        yield SearchGeneration(generation, living[0], len(known))


def _distinct(living: Sequence[JudgedExpression]) -> list[JudgedExpression]:
    return [*{str(each.expression): each for each in living}.values()]


def _winner(living: Sequence[JudgedExpression], random: Random) -> Expression:
    """Return the best of a few expressions that are drawn."""
    drawn = [random.choice(living) for _ in range(TOURNAMENT)]
    return min(drawn, key=lambda each: each.rank).expression


def drawn_expression(features: Sequence[str], depth: int, random: Random) -> Expression:
    """Draw a random expression over ``features`` with at most ``depth`` levels below its root."""
    if depth == 0 or random.random() < 0.25:
        if random.random() < 0.7:
            return feature(random.choice(features))
        return number(random.choice((0.0, 0.1, 0.5, 1.0, 2.0, 10.0, 100.0)))
    name = random.choice([*OPERATIONS, "+", "-", "*", "/"])
    parts = (
        drawn_expression(features, depth - 1, random)
        for _ in range(OPERATIONS[name].parts)
    )
    return Expression(name, tuple(parts))


def mutated(parent: Expression, features: Sequence[str], random: Random) -> Expression:
    """Return ``parent`` with one random change: a part is replaced, wrapped in an operation or left out, or a number is
    changed. ``features``: names that the result may use.
    """
    for _ in range(20):
        at = random.randrange(parent.size)
        old = _part(parent, at)
        kind = random.random()
        if old.operation == "number" and kind < 0.7:
            new = number(
                old.value * random.lognormvariate(0, 0.7) + random.gauss(0, 0.05)
            )
        elif kind < 0.35:
            new = drawn_expression(features, 2, random)
        elif kind < 0.65:
            name = random.choice(("+", "-", "*", "/", "min", "max"))
            other = drawn_expression(features, 1, random)
            new = Expression(
                name, (old, other) if random.random() < 0.5 else (other, old)
            )
        elif kind < 0.8 and old.parts:
            new = random.choice(old.parts)
        elif old.operation == "feature":
            new = feature(random.choice(features))
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
