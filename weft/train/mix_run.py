"""The mixture of a run: what its order is made of, and how a resumed run goes on from what its sources have given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weft.cache import digest
from weft.data.mix_plan import MixFacts, describe_mix, leg_of, mixture_of
from weft.data.order_inverse import samples_drawn
from weft.errors import UsageError, WeftError

if TYPE_CHECKING:
    from weft.checkpoint.run_state import Progress
    from weft.data.loader import Corpus
    from weft.data.mix_leg import MixLeg
    from weft.data.order import Order
    from weft.recipe import Recipe

#: Key of the mixture in what a loader keeps (:attr:`weft.checkpoint.run_state.Progress.loader`).
MIX = "mix"


def mix_facts(
    corpus: Corpus, recipe: Recipe, begun: int = 0, position: int = 0
) -> MixFacts:
    """Return the facts about a run's data sources from which a mixture computes its shares, such as their sizes.

    ``begun``: number of the step at which the mixture begins; ``position``: index of the first sample of this step.
    ``corpus``: the opened data.
    """
    order = corpus.train
    return MixFacts(
        corpus.names,
        order.weights,
        [stream.tokens for stream in order.streams],
        [stream.rows for stream in order.streams],
        recipe.train.batch,
        recipe.train.steps,
        begun,
        position,
    )


def with_mix(corpus: Corpus, recipe: Recipe) -> Corpus:
    """Return ``corpus`` with its training samples mixed as the recipe asks, from the first step on.

    A line about the mixture is added to the corpus's notes. Raises :class:`WeftError` if a source has nothing to train
    on, and :class:`UsageError` if a mixture by measured losses does not fit the recipe.
    """
    if len(corpus.names) < len(recipe.data.sources):
        empty = [s.title for s in recipe.data.sources if s.title not in corpus.names]
        raise WeftError(
            f"data source {(empty or corpus.names)[0]} holds nothing to train on, so it has no share of the mixture; "
            "leave it out"
        )
    if recipe.data.measures:
        _check_measured(corpus, recipe)
    if len(corpus.train.streams) < 2:
        describe_mix(recipe.data, mix_facts(corpus, recipe))
        return corpus
    facts = mix_facts(corpus, recipe)
    about = describe_mix(recipe.data, facts)
    notes = (*corpus.notes, mix_line(about, facts))
    return replace(
        corpus, train=_order(corpus.train, {"legs": [_first_leg(about)]}), notes=notes
    )


def _check_measured(corpus: Corpus, recipe: Recipe) -> None:
    """Refuse a mixture that measures losses where there is not one loss of tokens, or no reference to compare with."""
    mix = f"data.mix = {recipe.data.mix!r}"
    if recipe.layout.island > 1:
        raise UsageError(
            f"{mix} measures the losses of one model, and each of {recipe.layout.island} islands has its own; leave "
            "layout.island out"
        )
    if recipe.loss.kind != "cross-entropy" or recipe.rl is not None:
        raise UsageError(
            f"{mix} compares losses of tokens; leave loss.kind = {recipe.loss.kind!r} out"
        )
    if name := getattr(recipe.data, "mix_reference", ""):
        from weft.checkpoint.weights import open_pretrained

        opened = open_pretrained(name)
        own = opened.tokenizer()
        if (
            opened.values is None
            or opened.shape.vocab < corpus.tokenizer.vocab
            or (own and not own.has_ids_of(corpus.tokenizer))
        ):
            raise UsageError(
                f"data.mix_reference = {name!r} has other tokens than this run, or no weights; name a model with the "
                "same tokenizer"
            )


def mix_line(about: Mapping[str, Any], facts: MixFacts) -> str:
    """Return a line for the user that names the mixture and the share of each source, at first and at the end.

    ``about``: the mixture as :func:`weft.data.mix_plan.describe_mix` describes it. ``facts``: the sources and the
    length of the run.
    """
    mixture, end = mixture_of(about), facts.sample(facts.steps)
    here = facts.position
    first, last = mixture.shares(here, here + 1), mixture.shares(max(0, end - 1), end)
    line = f"mix: {about['kind']} by {'weighting' if 'rows' in about else 'sampling'}: {_shares(facts, first)}"
    if facts.steps and _shares(facts, last) != _shares(facts, first):
        line += f" at first, {_shares(facts, last)} at the end"
    return line


def _shares(facts: MixFacts, shares: Sequence[float]) -> str:
    named = zip(facts.names, shares, strict=True)
    return ", ".join(f"{name} {share:.1%}" for name, share in named)


def _first_leg(about: Mapping[str, Any], sources: int = 0) -> dict[str, Any]:
    count = sources or len(about.get("weights", about.get("points", [[]])[0]))
    return {"start": 0, "given": [0] * count, "origin": [0, 0], "plan": dict(about)}


def decisions_of_mix(kept: dict[str, Any]) -> dict[str, Any] | None:
    """Return the decisions so far of the last leg's mixture: a dict of JSON values that the mixture extends in place.

    A leg is a part of the sample order with one mixture. Returns None if the last leg's mixture measures nothing.
    ``kept``: the mixture as a checkpoint keeps it; its key "decided" refers to the returned dict.
    """
    last = kept["legs"][-1]
    if not hasattr(mixture_of(last["plan"]), "bound"):
        return None
    state: dict[str, Any] = kept.setdefault("decided", {})
    if state.get("start") != last["start"]:  # of an earlier mixture
        state.clear()
        state["start"] = last["start"]
    return state


def _order(order: Order, kept: dict[str, Any]) -> Order:
    """Return ``order`` with the legs of ``kept``, as checkpoints keep them; a plain order if it has fixed shares alone.

    A leg whose mixture has measured gives its samples as it has decided, also when other legs follow.
    """
    legs, now = kept["legs"], decisions_of_mix(kept)
    first = legs[0]["plan"]
    if len(legs) == 1 and first["kind"] == "static" and "rows" not in first:
        return replace(order, weights=tuple(first["weights"]), legs=())
    earlier = [leg.get("decided") for leg in legs[:-1]]
    return replace(
        order,
        legs=tuple(
            leg_of(leg["start"], leg["given"], leg["plan"], decided)
            for leg, decided in zip(legs, [*earlier, now], strict=True)
        ),
    )


def kept_mix(corpus: Corpus, kept: Mapping[str, Any]) -> Corpus:
    """Return ``corpus`` with its training samples in the order that the mixture ``kept`` gives.

    ``kept``: the mixture as a checkpoint keeps it.
    """
    return replace(corpus, train=_order(corpus.train, deepcopy(dict(kept))))


def with_decisions(leg: MixLeg, state: dict[str, Any]) -> MixLeg:
    """Return a copy of ``leg`` whose mixture reads and writes its decisions in ``state``.

    ``leg``: part of the sample order whose mixture follows measured losses. ``state``: result of
    :func:`decisions_of_mix`, which checkpoints keep.
    """
    mixture: Any = leg.weighed or getattr(leg.plan, "mixture", None)
    bound = mixture.bound(state)
    if leg.weighed is not None:
        return replace(leg, weighed=bound)
    return replace(leg, plan=replace(leg.plan, mixture=bound, _states={}))  # type: ignore[type-var]


def recalled_mix(
    kept: Mapping[str, Any], decisions: Sequence[tuple[int, Sequence[float]]]
) -> dict[str, Any]:
    """Return a copy of the mixture ``kept`` in a checkpoint, with the decisions that were recorded after that
    checkpoint.

    ``decisions``: pairs of the index of a step's first sample, and the sources' shares that were decided before this
    step, in order.
    """
    known = deepcopy(dict(kept))
    state = decisions_of_mix(known) if known else None
    if state is not None:
        mixture: Any = mixture_of(known["legs"][-1]["plan"], state)
        if recall := getattr(mixture, "recall", None):  # others move no samples
            for position, shares in decisions:
                recall(position, shares)
    return known


def resume_mix(corpus: Corpus, meta: Mapping[str, Any], progress: Progress) -> str:
    """Return the fingerprint of the recipe's data, by which the caller tells whether the data changed since a
    checkpoint.

    It is computed with the source weights of the checkpoint's run if that reproduces the checkpoint's fingerprint.
    ``progress`` then gets these weights as a fixed mixture, unless the checkpoint holds a mixture already. ``meta``:
    contents of the checkpoint's root file. ``corpus``: the recipe's data, as opened.
    """
    sources = meta.get("recipe", {}).get("data", {}).get("sources", ())
    weights = [source["weight"] for source in sources]
    fingerprint = corpus.fingerprint_with(weights)
    if fingerprint != meta["data"]:
        return corpus.fingerprint
    about = {"kind": "static", "weights": weights}
    kept = {"documents": digest(corpus.ingredients), "legs": [_first_leg(about)]}
    progress.loader.setdefault(MIX, kept)
    return fingerprint


def continued_mix(
    corpus: Corpus, recipe: Recipe, progress: Progress
) -> tuple[Corpus, list[str]]:
    """Return ``corpus`` in the sample order of a resumed run, and lines to print.

    Samples before the run's present position keep their order. If the recipe now asks for another mixture, it begins at
    that position, and each source goes on after the samples that were drawn from it. ``progress``: the run's progress,
    whose loader state gets the mixture, so that later checkpoints hold it.
    """
    order = corpus.train
    if len(order.streams) < 2:
        return corpus, []
    documents = digest(corpus.ingredients)
    kept = progress.loader.get(MIX, {})
    if kept.get("documents") != documents:  # of a new run, or of other data
        about = describe_mix(recipe.data, mix_facts(corpus, recipe))
        kept = {"documents": documents, "legs": [_first_leg(about, len(order.streams))]}
    legs, notes = [*kept["legs"]], list[str]()
    last = legs[-1]
    about = describe_mix(recipe.data, mix_facts(corpus, recipe, *last["origin"]))
    if about != last["plan"]:
        facts = mix_facts(corpus, recipe, progress.step, progress.position)
        given = samples_drawn(_order(order, kept), progress.position)
        if decided := decisions_of_mix(kept):
            legs[-1] = {**last, "decided": decided}
        leg: dict[str, Any] = {
            "start": progress.position,
            "given": given,
            "origin": [progress.step, progress.position],
            "plan": describe_mix(recipe.data, facts),
        }
        rows = ", ".join(
            f"{name} {count:,}" for name, count in zip(corpus.names, given, strict=True)
        )
        notes.append(
            f"another mix from sample {progress.position:,} on: {mix_line(leg['plan'], facts).removeprefix('mix: ')}; "
            f"each source goes on after the samples that it has given: {rows}"
        )
        legs = [*(each for each in legs if each["start"] < progress.position), leg]
        kept = {"documents": documents, "legs": legs}
    progress.loader[MIX] = kept
    return replace(corpus, train=_order(order, kept)), notes
