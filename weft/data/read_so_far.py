"""What a run has read so far, source by source. Counts are kept with the run's progress, in its checkpoints.

As long as the data stay the same, one entry is continued, under whatever layout. With other data a new one begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.paths import home_path
from weft.recipe.curated_folder import read_card

if TYPE_CHECKING:
    from weft.data.loader import Corpus
    from weft.data.order import Order

#: Key of the entries in what a run's progress keeps for loaders.
READ = "data"
#: What is kept of the card of a data run, for each source that the data run has read.
_OF_PIPELINE = ("name", "read", "documents", "dropped", "duplicates", "contaminated")


def begin_reading(kept: dict[str, Any], corpus: Corpus, position: int) -> None:
    """Begin an entry in ``kept`` that counts what is read of ``corpus``.

    If the last entry already counts the same data, it goes on and nothing is changed. ``kept``: JSON values that
    checkpoints keep, changed in place. ``position``: number of the first sample that is read.
    """
    entries = kept.get(READ, [])
    if not corpus.opened or (
        entries and entries[-1]["fingerprint"] == corpus.fingerprint
    ):
        return
    sources = [_about(corpus, number) for number in range(len(corpus.train.streams))]
    entry = {"fingerprint": corpus.fingerprint, "from": position, "sources": sources}
    kept[READ] = [*entries, entry]


def _about(corpus: Corpus, number: int) -> dict[str, Any]:
    """Return what is known of the source of training stream ``number``, as JSON values."""
    stream = corpus.train.streams[number]
    about: dict[str, Any] = {
        "trained_documents": len(stream.starts),
        "trained_tokens": stream.tokens,
        "rows": stream.rows,
        "samples": 0,
    }
    for source, tokens in corpus.opened:
        if tokens.ids is stream.ids:
            about["name"] = source.shown
            about["documents"] = len(tokens.offsets) - 1
            about["tokens"] = int(tokens.offsets[-1])
            path = home_path(source.path or "")
            card = read_card(path) or read_card(path.parent) if source.path else None
            if card is not None:
                about["pipeline"] = [
                    {key: value for key, value in part.items() if key in _OF_PIPELINE}
                    for part in card["sources"]
                ]
    return about


def count_read(kept: Mapping[str, Any], order: Order, samples: range) -> None:
    """Count ``samples`` of ``order`` as read, in the entry that :func:`begin_reading` has begun."""
    for entry in kept.get(READ, [])[-1:]:
        for source, count in zip(
            entry["sources"], _samples_by_stream(order, samples), strict=True
        ):
            source["samples"] += count


def _samples_by_stream(order: Order, samples: range) -> list[int]:
    """Return how many of ``samples`` each stream has."""
    if len(order.streams) == 1:
        return [len(samples)]
    streams = [order.locate(sample)[0] for sample in samples]
    return np.bincount(streams, minlength=len(order.streams)).tolist()


def read_so_far(kept: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return how much of each source a run has read, one JSON object per source, in the order in which reading began.

    ``epochs``: how often the source was read, with a fraction for a part. ``tokens_read``: number of tokens that were
    read, counted again in every epoch. ``lines``: the same in words, from :func:`reading_lines`. ``kept``: the JSON
    values in which :func:`count_read` counts.
    """
    # several sources may be of one path, as parts of its records; they are told apart by their order
    sources: dict[str, dict[str, Any]] = {}
    for entry in kept.get(READ, []):
        names = [about["name"] for about in entry["sources"]]
        for i, about in enumerate(entry["sources"]):
            key = f"{names[:i].count(names[i])} {names[i]}"
            epochs = about["samples"] / about["rows"]
            before = sources.get(key, {"epochs": 0.0, "tokens_read": 0})
            joined = {
                **{key: value for key, value in about.items() if key != "rows"},
                "samples": before.get("samples", 0) + about["samples"],
                "epochs": round(before["epochs"] + epochs, 6),
                "tokens_read": before["tokens_read"]
                + round(epochs * about["trained_tokens"]),
            }
            sources[key] = joined | {"lines": reading_lines(joined)}
    return [*sources.values()]


def reading_lines(about: Mapping[str, Any]) -> list[str]:
    """Return lines for the user about one source: how much was read, and how much a data pipeline had dropped before.

    ``about``: the object of the source from :func:`read_so_far`.
    """
    left = about["documents"] - about["trained_documents"]
    apart = f" ({left:,} held out or left out)" if left > 0 else ""
    lines = [
        f"{about['epochs']:.3g} epochs of {about['documents']:,} documents{apart} with {about['tokens']:,} tokens: "
        f"{about['tokens_read']:,} tokens read"
    ]
    for source in about.get("pipeline", ()):
        by_step = [f"{n:,} by {step}" for step, n in source["dropped"].items() if n]
        lines.append(
            f"from {source['name']}: {source['documents']:,} of {source['read']:,} documents kept; dropped: "
            f"{', '.join(by_step) or 'none'}; {source['duplicates']:,} duplicates, {source['contaminated']:,} "
            "contaminated"
        )
    return lines
