"""Where a run's documents were trained on: the steps of a document, and the documents of a step.

Nothing is logged for this. The records of a run tell how each of its attempts read the data; the order of the data and
the shares of the ranks are pure functions of that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from weft.data.document_names import DocumentNames, names_of_documents, unknown_document
from weft.data.loader import Corpus, Loader, open_data
from weft.data.order import Order
from weft.data.order_inverse import documents_of_sample, samples_of_document
from weft.errors import UsageError, WeftError
from weft.layout.axes import BATCH_AXES
from weft.layout.layout import Layout
from weft.layout.placement import Place
from weft.observe.run_metrics import Record, read_metrics
from weft.paths import home_path
from weft.recipe import Recipe, build_recipe
from weft.recipe.masked import unmasked_values
from weft.train.mix_run import kept_mix, recalled_mix
from weft.train.setup import recipe_tokenizer

#: Documents of one file that are looked up by the file's name alone.
MOST = 20


class DocumentUse(NamedTuple):
    """One use of a document in a run: a sample of a step that contains tokens of the document.

    Attributes:
        ``step``: number of the step, from 1.
        ``epoch``: number of the epoch of the document's source, from 1.
        ``sample``: index of the sample in the run's order of samples, from 0.
        ``first``, ``last``: range of the document's tokens in the sample, ``last`` excluded.
        ``place``: index, from 0, of the data-parallel replica that computed the sample; None if samples of a step are
            spread over all replicas, so that no single one is known.
        ``places``: number of data-parallel replicas.
        ``ranks``: the ranks of the replica ``place``; empty if they are not known.
        ``skipped``: whether the step changed nothing, because its loss or gradient was not finite.
    """

    step: int
    epoch: int
    sample: int
    first: int
    last: int
    place: int | None
    places: int
    ranks: tuple[int, ...]
    skipped: bool


@dataclass(frozen=True)
class UsedDocument:
    """A document of a run, with the steps that used it.

    ``name``: its file and line. ``source``: the path or kind of its source. ``tokens``: its number of tokens.
    ``state``: "trained", "held out" for validation, or "left out" because it is too long or has nothing to learn.
    ``uses``: its uses in training, in order; empty if there are none.
    """

    name: str
    source: str
    tokens: int
    state: str
    uses: tuple[DocumentUse, ...]

    def line(self) -> str:
        """Return one line for the user: where the document is from, and in how many steps and which epochs it was
        trained on.
        """
        head = f"{self.name} of data source {self.source}: {self.tokens:,} tokens, "
        if self.state == "held out":
            return head + "held out for validation: never trained on"
        if self.state == "left out":
            return (
                head
                + "left out, as it is too long or has nothing to learn: never trained on"
            )
        if not self.uses:
            return head + "not trained on yet"
        steps = len({use.step for use in self.uses})
        epochs = sorted({use.epoch for use in self.uses})
        listed = ", ".join(map(str, epochs[:8])) + (" ..." if len(epochs) > 8 else "")
        return head + (
            f"trained on in {steps:,} step{'s' * (steps > 1)}, epoch{'s' * (len(epochs) > 1)} {listed}"
        )


class StepDocument(NamedTuple):
    """A document of which a step uses some tokens.

    ``name``: file and line of the document. ``use``: which of its tokens the step uses, and where.
    """

    name: str
    use: DocumentUse


@dataclass(frozen=True)
class Attempt:
    """Consecutive steps of a run that were taken with one recipe; each resume begins another attempt.

    Attributes:
        ``recipe``: the recipe of these steps.
        ``steps``: indices of the steps, from 0.
        ``position``: index of the first sample of the first step, in the order of the training samples.
        ``fingerprint``: digest of the training data.
        ``mix``: mixture of the data sources, as checkpoints keep it; empty if each source has a fixed weight.
    """

    recipe: Recipe
    steps: range
    position: int
    fingerprint: str
    mix: Mapping[str, Any] = field(default_factory=dict)

    def samples(self, total: int | None) -> range:
        """Return the indices of the samples that the attempt's steps used.

        ``total``: number of samples in the order of the data; None if the order has no end.
        """
        end = self.position + self.recipe.train.batch * len(self.steps)
        return range(self.position, min(end, total or sys.maxsize))


def attempts_of(run: Path, given: Recipe | None = None) -> list[Attempt]:
    """Return the attempts of the run in the folder ``run``, oldest first.

    ``given``: a recipe that has the secrets of addresses, which the records lack; None if there are none.
    An attempt ends where the next one begins, because a resumed run repeats the steps that came after its checkpoint.
    Raises :class:`UsageError` for a run of reinforcement learning, whose samples are not documents.
    """
    records = read_metrics(run)
    last = max(r["step"] for kind in records.values() for r in kind)
    heads = records["run"]
    attempts: list[Attempt] = []
    position = 0
    for number, head in enumerate(heads):
        end = min([last, *(later["step"] for later in heads[number + 1 :])])
        recipe = _recipe_of(head, given)
        if recipe.rl is not None:
            raise UsageError(
                f"{run} is a run of reinforcement learning: its samples come from its model, and are no documents"
            )
        begin = head["step"]
        if attempts and "position" not in head:  # of a version that did not record it
            before = attempts[-1]
            taken = before.recipe.train.batch * (begin - before.steps.start)
            position = before.position + taken
        position = head.get("position", position)
        steps = range(begin, max(begin, end))
        decisions = [
            (position + (r["step"] - begin) * recipe.train.batch, r["decided"])
            for r in records.get("mix", ())
            if r["step"] in steps and "decided" in r
        ]
        mix = recalled_mix(head.get("mix", {}), decisions)
        attempts.append(Attempt(recipe, steps, position, head["data"], mix))
    return [attempt for attempt in attempts if attempt.steps]


def _recipe_of(head: Record, given: Recipe | None) -> Recipe:
    """Return the recipe of an attempt, whose relative paths are those of its working folder, with the addresses of
    ``given``.
    """
    values: dict[str, Any] = json.loads(json.dumps(head["recipe"]))
    if given is not None:
        full = given.data.model_dump(mode="json")
        values["data"] = unmasked_values(values.get("data", {}), full)
    folder = head.get("folder")
    data = values.get("data", {})
    places = [(source, "path") for source in data.get("sources", [])]
    places += [(data, "validation"), (data, "tokenizer"), (data, "cache")]
    for section, key in places:
        given = section.get(key)
        if folder and isinstance(given, str) and given and "://" not in given:
            below = Path(folder, given)
            if not home_path(given).is_absolute() and below.exists():
                section[key] = str(below)
    return build_recipe(values)


@dataclass(frozen=True)
class RunDocuments:
    """Finds which documents the steps of a run used, and which steps used a document.

    ``run``: the run's folder. ``given``: a recipe that has the secrets of addresses, such as the run's own; None: the
    records have none.
    """

    run: Path
    given: Recipe | None = None

    @cached_property
    def attempts(self) -> list[Attempt]:
        """The attempts of the run (steps taken with one recipe each), oldest first."""
        return attempts_of(self.run, self.given)

    def corpus(self, attempt: Attempt) -> Corpus:
        """Open the data of an attempt, in the order in which the attempt read them.

        Raises :class:`WeftError` if the data have changed since the attempt, as their fingerprint shows.
        """
        key = attempt.recipe.data.model_dump_json() + json.dumps(attempt.mix)
        if key not in self._corpora:
            hint = self._address_hint(attempt.recipe)
            try:
                opened = open_data(
                    attempt.recipe.data, recipe_tokenizer(attempt.recipe)
                )
            except WeftError as error:
                usage = isinstance(error, UsageError)
                raise (UsageError if usage else WeftError)(f"{error}{hint}") from None
            if opened.fingerprint != attempt.fingerprint:
                raise WeftError(
                    f"the data of {self.run} have changed since step {attempt.steps.start}, so that nobody can tell "
                    f"which documents its steps had; bring the old files back{hint}"
                )
            self._corpora[key] = (
                kept_mix(opened, attempt.mix) if attempt.mix else opened
            )
        return self._corpora[key]

    def _address_hint(self, recipe: Recipe) -> str:
        """Return what to do if an address of ``recipe``, which the records have without its secrets, needs them."""
        sources = [s.path for s in recipe.data.sources if s.path and "://" in s.path]
        if self.given is not None or not sources:
            return ""
        return (
            f" ({sources[0]} is recorded without password and query; if it has any, give the run's recipe: "
            "weft data who --recipe FILE)"
        )

    @cached_property
    def _corpora(self) -> dict[str, Corpus]:
        return {}

    @cached_property
    def _names(self) -> dict[int, DocumentNames | None]:
        return {}

    def names(self, corpus: Corpus, source: int) -> DocumentNames | None:
        """Return the names of the documents of the source with the index ``source`` in ``corpus``; None if they have
        none.
        """
        key = id(corpus.opened[source][1])
        if key not in self._names:
            self._names[key] = names_of_documents(*corpus.opened[source])
        return self._names[key]

    @cached_property
    def _skipped(self) -> set[int]:
        return {
            r["step"]
            for r in read_metrics(self.run).get("train", [])
            if r.get("skipped")
        }

    def find(self, name: str) -> list[UsedDocument]:
        """Return the documents called ``name``, each with its uses in all attempts.

        ``name``: a file, ``FILE:LINE``, ``FILE#NUMBER`` (the index of a document in the file), or the field "id" of a
        record. Raises :class:`UsageError` if no source has such a document, or if ``name`` stands for more than 20
        documents.
        """
        listed: dict[tuple[str, str], UsedDocument] = {}
        known: list[DocumentNames] = []
        for by_id in (False, True):
            for attempt in self.attempts:
                corpus = self.corpus(attempt)
                for number in range(len(corpus.opened)):
                    names = self.names(corpus, number)
                    if names is None:
                        continue
                    known.append(names)
                    documents = names.with_id(name) if by_id else names.find(name)
                    if len(documents) > MOST:
                        raise UsageError(
                            f"{name} has {len(documents):,} documents; give one as {name}:LINE, such as "
                            f"{names.name(documents[0])}"
                        )
                    for document in documents:
                        used = self._used(attempt, corpus, number, document, names)
                        before = listed.get((used.source, used.name))
                        if before is not None:
                            used = _joined(before, used)
                        listed[used.source, used.name] = used
            if listed:
                return [*listed.values()]
        if not known:
            raise UsageError(
                f"the sources of {self.run} are token files, whose documents have no names; 'weft data who --step' "
                "tells their numbers"
            )
        raise unknown_document(name, known)

    def _used(
        self,
        attempt: Attempt,
        corpus: Corpus,
        source: int,
        document: int,
        names: DocumentNames,
    ) -> UsedDocument:
        """Return a document with its uses in one attempt."""
        section, tokens = corpus.opened[source]
        first, last = tokens.offsets[document : document + 2].tolist()

        def in_streams(order: Order | None) -> list[tuple[int, int]]:
            """The streams with the document, and its numbers there: a conversation may be in several samples."""
            return [
                (number, int(place))
                for number, stream in enumerate(order.streams if order else ())
                if stream.ids is tokens.ids
                for place in np.flatnonzero(
                    (stream.starts >= first) & (stream.starts < last)
                )
            ]

        trained = in_streams(corpus.train)
        state = "trained" if trained else "left out"
        if not trained and in_streams(corpus.validation):
            state = "held out"
        samples = attempt.samples(corpus.train.total)
        uses = [
            self._use(attempt, corpus, use.sample, use.epoch, use.first, use.last)
            for stream, number in trained
            for use in samples_of_document(corpus.train, stream, number, samples)
        ]
        return UsedDocument(
            names.name(document),
            section.shown,
            last - first,
            state,
            tuple(sorted(uses)),
        )

    def _use(
        self,
        attempt: Attempt,
        corpus: Corpus,
        sample: int,
        epoch: int,
        first: int,
        last: int,
    ) -> DocumentUse:
        batch = attempt.recipe.train.batch
        after = (sample - attempt.position) // batch
        step = attempt.steps.start + after + 1
        place, places, ranks = _place(
            attempt.recipe, corpus.train, attempt.position + after * batch, sample
        )
        return DocumentUse(
            step,
            epoch + 1,
            sample,
            first,
            last,
            place,
            places,
            ranks,
            step in self._skipped,
        )

    def of_step(self, step: int) -> list[StepDocument]:
        """Return the documents of a step (from 1), ordered by data-parallel replica and by the step's samples.

        Raises :class:`UsageError` if the run has not taken the step.
        """
        attempt = next((a for a in self.attempts if step - 1 in a.steps), None)
        if attempt is None:
            taken = self.attempts[-1].steps.stop if self.attempts else 0
            raise UsageError(
                f"{self.run} has taken {taken:,} steps; step {step:,} is not one of them"
            )
        corpus, batch = self.corpus(attempt), attempt.recipe.train.batch
        begin = attempt.position + (step - 1 - attempt.steps.start) * batch
        every = attempt.samples(corpus.train.total)
        return [
            document
            for sample in range(begin, min(begin + batch, every.stop))
            for document in self._of_sample(attempt, corpus, sample)
        ]

    def _of_sample(
        self, attempt: Attempt, corpus: Corpus, sample: int
    ) -> Iterator[StepDocument]:
        stream_number, index = corpus.train.locate(sample)
        epoch = index // corpus.train.streams[stream_number].rows
        for held in documents_of_sample(corpus.train, sample):
            stream = corpus.train.streams[held.stream]
            source = next(
                i
                for i, (_, tokens) in enumerate(corpus.opened)
                if tokens.ids is stream.ids
            )
            tokens = corpus.opened[source][1]
            start = int(stream.starts[held.document])
            document = int(np.searchsorted(tokens.offsets, start, "right")) - 1
            names = self.names(corpus, source)
            section = corpus.opened[source][0]
            name = f"document {document} of {section.shown}"
            use = self._use(attempt, corpus, sample, epoch, held.first, held.last)
            yield StepDocument(names.name(document) if names else name, use)


def _joined(before: UsedDocument, after: UsedDocument) -> UsedDocument:
    """Return a document with its uses in an earlier and in a later attempt."""
    state = before.state if before.state == "trained" else after.state
    uses = (*before.uses, *(use for use in after.uses if use not in before.uses))
    return UsedDocument(after.name, after.source, after.tokens, state, uses)


class _SamplePlace(NamedTuple):
    place: int | None
    places: int
    ranks: tuple[int, ...]


def _place(recipe: Recipe, order: Order, position: int, sample: int) -> _SamplePlace:
    """Return the data-parallel place that had ``sample`` in the step that began at ``position``, and its ranks."""
    layout = recipe.layout
    if recipe.resilience.code or layout.balance:
        # samples are spread over all ranks, by code or by the time that documents take
        return _SamplePlace(None, layout.size(*BATCH_AXES), ())
    cut = recipe.batch_layout(layout)
    rows, passes = recipe.rows_per_pass(layout)
    loader = Loader(
        order, cut, 0, 0, recipe.train.batch, rows, passes, recipe.data.seq_len
    )
    ranges = loader.sample_ranges(position)
    place = next((i for i, own in enumerate(ranges) if sample in own), None)
    ranks = _ranks_of(layout, cut, place) if place is not None else ()
    return _SamplePlace(place, len(ranges), ranks)


def _ranks_of(layout: Layout, cut: Layout, place: int) -> tuple[int, ...]:
    """Return the ranks of a place. With pairs of ranks that get the same samples, ``cut`` has fewer places."""
    if cut != layout:
        return ()
    return tuple(
        rank
        for rank in range(layout.world)
        if Place.of(layout, rank).along(*BATCH_AXES) == place
    )


def format_uses(uses: Sequence[DocumentUse], tokens: int, most: int) -> list[str]:
    """Return the lines of a table of a document's uses: a heading, a line per use, and a line if more uses follow.

    ``uses``: the uses to list, of which the table shows at most ``most``. ``tokens``: number of tokens of the document.
    """
    lines = [f"{'step':>9} {'epoch':>6} {'sample':>12} {'place':>9}  tokens"]
    for use in uses[:most]:
        whose = "any" if use.place is None else f"{use.place} of {use.places}"
        part = f"{use.first:,} to {use.last - 1:,} of {tokens:,}"
        skipped = "  (the step was skipped)" * use.skipped
        lines.append(
            f"{use.step:>9,} {use.epoch:>6,} {use.sample:>12,} {whose:>9}  {part}{skipped}"
        )
    if len(uses) > most:
        lines.append(f"and {len(uses) - most:,} more (--most)")
    return lines
