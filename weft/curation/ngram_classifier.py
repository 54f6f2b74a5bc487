"""Classifier of texts: a logistic regression on hashed n-grams, in one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from weft.curation.hashed_ngrams import NgramSettings, SparseVector, ngram_vector
from weft.errors import WeftError, why_unwritten
from weft.section import validated

#: Key of the file's metadata, and what its value begins with.
_KEY, _FORMAT = "weft", "weft ngram classifier 1"


@dataclass(frozen=True)
class NgramClassifier:
    """Logistic regression on hashed n-grams.

    Attributes:
        ``settings``: settings by which texts are converted to vectors.
        ``weights``: weight of each hashed n-gram, float32 ``[2**bits]``.
        ``bias``: number added to the weighted sum.
    """

    settings: NgramSettings
    weights: np.ndarray
    bias: float

    def probability(self, text: str) -> float:
        """Return the probability, from 0 to 1, that ``text`` is like the positive examples of the training and not like
        the negative ones. Both kinds count as equally frequent.
        """
        vector = ngram_vector(text, self.settings)
        return self.probability_of(vector)

    def probability_of(self, vector: SparseVector) -> float:
        """Return the probability of :meth:`probability` for a text that has been converted to ``vector`` already."""
        weights = self.weights[vector.indices].astype(np.float64)
        return float(_sigmoid(weights @ vector.values.astype(np.float64) + self.bias))


def fit_classifier(
    vectors: Sequence[SparseVector],
    labels: Sequence[bool],
    settings: NgramSettings,
    epochs: int = 8,
    rate: float = 0.5,
    batch: int = 32,
    seed: int = 0,
) -> NgramClassifier:
    """Fit a logistic regression to examples by AdaGrad (Duchi et al. 2011), and return it. Both classes get the same
    total weight, whatever their sizes.

    ``vectors``, ``labels``: the examples, of both classes; ``settings``: how texts were converted to the vectors;
    ``epochs``: passes over them; ``rate``: learning rate; ``batch``: examples of an update; ``seed``: seed of their
    order.
    """
    truth = np.asarray(labels, np.float64)
    shares = truth.mean(), 1 - truth.mean()
    importance = np.where(truth > 0, 0.5 / shares[0], 0.5 / shares[1])
    weights, squares = np.zeros(1 << settings.bits), np.full(1 << settings.bits, 1e-8)
    bias, bias_squares = 0.0, 1e-8
    random = np.random.default_rng(seed)
    for _ in range(epochs):
        order = random.permutation(len(vectors))
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            indices = np.concatenate([vectors[i].indices for i in chosen])
            values = np.concatenate([vectors[i].values for i in chosen])
            rows = np.repeat(
                np.arange(len(chosen)), [len(vectors[i].indices) for i in chosen]
            )
            logits = np.bincount(rows, weights[indices] * values, len(chosen)) + bias
            errors = (_sigmoid(logits) - truth[chosen]) * importance[chosen]
            touched, places = np.unique(indices, return_inverse=True)
            slopes = np.bincount(places, errors[rows] * values) / len(chosen)
            squares[touched] += slopes**2
            weights[touched] -= rate * slopes / np.sqrt(squares[touched])
            bias_squares += errors.mean() ** 2
            bias -= rate * errors.mean() / bias_squares**0.5
    return NgramClassifier(settings, weights.astype(np.float32), float(bias))


def _sigmoid(logits: Any) -> Any:
    return 0.5 * (1 + np.tanh(0.5 * logits))


def save_classifier(
    classifier: NgramClassifier, file: Path, report: dict[str, Any]
) -> None:
    """Write the classifier to ``file`` (safetensors), and the ``report`` of its evaluation to the .json file beside it.

    Raises :class:`WeftError` if a file cannot be written.
    """
    from safetensors.numpy import save

    about = {"format": _FORMAT, "settings": classifier.settings.model_dump()}
    tensors = {
        "weights": classifier.weights,
        "bias": np.array([classifier.bias], np.float32),
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(save(tensors, metadata={_KEY: json.dumps(about)}))
        report_file(file).write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise WeftError(
            f"--out {file} cannot be written: {why_unwritten(error, 'name another file')}"
        ) from None


def report_file(file: Path) -> Path:
    """Return the path of the report beside a classifier's file."""
    return file.with_name(f"{file.name}.json")


def load_classifier(file: Path) -> NgramClassifier:
    """Read a classifier from ``file``, which :func:`save_classifier` has written.

    Raises :class:`WeftError` for a file that is missing, damaged or not a classifier.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), "numpy") as stored:
            about = json.loads((stored.metadata() or {}).get(_KEY, "{}"))
            if about.get("format") != _FORMAT:
                raise WeftError(
                    f"{file} is no classifier of texts; weft data classify writes one"
                )
            weights, bias = stored.get_tensor("weights"), stored.get_tensor("bias")
    except (OSError, SafetensorError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeftError(
            f"the classifier {file} cannot be read: {reason}; weft data classify writes one"
        ) from None
    settings = validated(NgramSettings, about["settings"], str(file))
    return NgramClassifier(settings, weights, float(bias[0]))


def file_digest(files: Iterable[Path]) -> str:
    """Return a digest of the contents of ``files``, in this order."""
    digest = sha256()
    for file in files:
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:24]
