"""Train a classifier on folders of good and of bad texts, and judge it on packages that it has not seen."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from weft.curation.example_texts import ExampleText
from weft.curation.hashed_ngrams import NgramSettings, ngram_vector
from weft.curation.ngram_classifier import NgramClassifier, fit_classifier
from weft.curation.ranking import RankingQuality, ranking_quality
from weft.errors import UsageError

#: Groups below which an interval by drawing groups anew says little.
_FEW = 10


@dataclass(frozen=True)
class ClassifierReport:
    """Report on the training and evaluation of a classifier.

    Attributes:
        ``auc``: area under the ROC curve on the held-out examples.
        ``auc_low``, ``auc_high``: ends of its 95 % interval, by a bootstrap over groups.
        ``trained_positive``, ``trained_negative``: numbers of examples that it was trained on.
        ``judged_positive``, ``judged_negative``: numbers of examples that it was judged on.
        ``trained_groups``: number of groups that it was trained on.
        ``held_out``: names of the groups that it was judged on.
        ``accuracy``: share of the held-out examples on the right side of 0.5, both classes counting the same.
    """

    auc: float
    auc_low: float
    auc_high: float
    trained_positive: int
    trained_negative: int
    judged_positive: int
    judged_negative: int
    trained_groups: int
    held_out: tuple[str, ...]
    accuracy: float

    def as_json(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold, by the names of the attributes."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return lines for the user with the results of training and evaluation."""
        groups = len(self.held_out)
        few = f"note: with {groups} held-out groups the interval says little; give more folders, or raise --held-out"
        shown = ", ".join(self.held_out[:8]) + (" ..." if groups > 8 else "")
        return [
            f"trained on {self.trained_positive} positive and {self.trained_negative} negative examples of "
            f"{self.trained_groups} groups",
            f"AUC {self.auc:.4f} (95 % interval {self.auc_low:.4f} to {self.auc_high:.4f}, groups drawn anew), "
            f"balanced accuracy {self.accuracy:.1%}",
            f"judged on {self.judged_positive} positive and {self.judged_negative} negative examples of {groups} "
            f"groups that it was not trained on: {shown}",
            *([few] if groups < _FEW else []),
        ]


@dataclass(frozen=True)
class TrainedClassifier:
    """A trained ``classifier``, and the ``report`` of its training and of its evaluation on held-out examples."""

    classifier: NgramClassifier
    report: ClassifierReport


def train_classifier(
    positive: Sequence[ExampleText],
    negative: Sequence[ExampleText],
    settings: NgramSettings | None = None,
    share: float = 0.2,
    seed: int = 0,
) -> TrainedClassifier:
    """Train a classifier on most groups of the examples, and evaluate it on the held-out groups.

    ``positive``, ``negative``: good and bad examples. A group may have examples of both, such as a package and its
    corrupted copy; it is held out as a whole. ``settings``: how texts become vectors; None: the default. ``share``:
    share of groups that are held out. ``seed``: seed of their choice and of the training. Raises :class:`UsageError` if
    there are too few groups for both parts.
    """
    settings = settings or NgramSettings()
    examples = sorted(
        [(example, True) for example in positive]
        + [(example, False) for example in negative],
        key=lambda pair: (pair[0].group, pair[0].name, pair[1], pair[0].text),
    )
    texts = [example for example, _ in examples]
    groups = np.array([example.group for example in texts], np.str_)
    labels = np.array([label for _, label in examples], bool)
    held = np.isin(groups, held_out_groups(groups, labels, share, seed))
    vectors = [ngram_vector(example.text, settings) for example in texts]
    trained, judged = np.flatnonzero(~held), np.flatnonzero(held)
    classifier = fit_classifier(
        [vectors[i] for i in trained], labels[trained].tolist(), settings, seed=seed
    )
    scores = np.array([classifier.probability_of(vectors[i]) for i in judged])
    quality = ranking_quality(scores, labels[judged], groups[judged], seed=seed)
    return TrainedClassifier(classifier, _report(quality, scores, labels, groups, held))


def _report(
    quality: RankingQuality,
    scores: np.ndarray,
    labels: np.ndarray,
    groups: np.ndarray,
    held: np.ndarray,
) -> ClassifierReport:
    truth = labels[held]
    rights = [float((scores[truth == side] > 0.5).mean()) for side in (True, False)]
    return ClassifierReport(
        *quality,
        trained_positive=int(labels[~held].sum()),
        trained_negative=int((~labels[~held]).sum()),
        judged_positive=int(truth.sum()),
        judged_negative=int((~truth).sum()),
        trained_groups=len(np.unique(groups[~held])),
        held_out=tuple(np.unique(groups[held]).tolist()),
        accuracy=(rights[0] + 1 - rights[1]) / 2,
    )


def held_out_groups(
    groups: np.ndarray, labels: np.ndarray, share: float, seed: int
) -> list[str]:
    """Return the names of the groups that are held out, at least ``share`` of all, with examples of both classes.

    ``groups``, ``labels``: name of the group of each example, and whether it is positive, both ``[examples]``. The
    choice depends on names and ``seed`` alone. Raises :class:`UsageError` if one part has no example of a class.
    """
    names = np.unique(groups).tolist()
    names.sort(key=lambda name: hashlib.sha256(f"{seed}:{name}".encode()).digest())
    for count in range(max(1, round(share * len(names))), len(names)):
        held = np.isin(groups, names[:count])
        if len({*labels[held].tolist()}) == len({*labels[~held].tolist()}) == 2:
            return sorted(names[:count])
    few = min(len(np.unique(groups[labels == side])) for side in (True, False))
    raise UsageError(
        f"{len(names)} groups ({few} of the class that has fewer) cannot be divided into groups to train on and groups "
        "to judge on, both with positive and negative examples; give more folders or files, or --group for records"
    )
