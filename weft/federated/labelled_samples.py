"""Samples with a class each, from scikit-learn or a file of NumPy arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.errors import UsageError, WeftError, nearest
from weft.paths import home_path

#: The sets that come with scikit-learn, by the name after "sklearn:".
BUNDLED = ("digits", "wine", "breast_cancer")


@dataclass(frozen=True)
class LabelledSamples:
    """Samples for classification.

    Attributes:
        ``features``: float32 ``[samples, values]``.
        ``labels``: number of each sample's class, int64 ``[samples]``.
        ``groups``: the group of each sample (its author, its package); None if the samples have none.
    """

    features: np.ndarray
    labels: np.ndarray
    groups: np.ndarray | None = None

    @property
    def classes(self) -> int:
        """Number of classes: one more than the largest label."""
        return int(self.labels.max()) + 1


def read_labelled(where: str) -> LabelledSamples:
    """Read samples: ``"sklearn:digits"``, ``"sklearn:wine"``, ``"sklearn:breast_cancer"``, or the path of an .npz file.

    The file holds ``features`` ``[samples, ...]``, ``labels`` ``[samples]`` and optionally ``groups``. Raises
    :class:`UsageError` or :class:`WeftError` for anything else.
    """
    if where.startswith("sklearn:"):
        return _bundled(where.removeprefix("sklearn:"))
    path = home_path(where)
    if not path.is_file():
        raise UsageError(
            f"samples {where!r} are neither a file nor one of {', '.join(f'sklearn:{name}' for name in BUNDLED)}"
        )
    try:
        with np.load(path) as arrays:
            missing = {"features", "labels"} - {*arrays.files}
            if missing:
                raise UsageError(
                    f"{path} has no array {sorted(missing)[0]!r}; it needs 'features' [samples, ...] and 'labels' "
                    "[samples]"
                )
            features, labels = arrays["features"], arrays["labels"]
            groups = arrays["groups"] if "groups" in arrays.files else None
    except (OSError, ValueError) as error:
        raise WeftError(f"{path} cannot be read as an .npz file: {error}") from None
    if labels.ndim != 1 or len(labels) != len(features) or not len(labels):
        raise WeftError(
            f"{path} has features {list(features.shape)} and labels {list(labels.shape)}; both need one row for each "
            "sample"
        )
    if labels.dtype.kind not in "iu" or labels.min() < 0:
        raise WeftError(f"{path} has labels that are not whole numbers from 0")
    flat = features.reshape(len(features), -1).astype(np.float32)
    if not np.isfinite(flat).all():
        raise WeftError(f"{path} has features that are not finite")
    return LabelledSamples(flat, labels.astype(np.int64), groups)


def _bundled(name: str) -> LabelledSamples:
    if name == "digits":
        from weft.data.digits import read_digits

        digits = read_digits()
        return LabelledSamples(digits.images.reshape(-1, 64), digits.labels)
    if name not in BUNDLED:
        every = [f"sklearn:{known}" for known in BUNDLED]
        asked = f"sklearn:{name}"
        raise UsageError(f"there is no {asked!r}; {nearest(asked, every, True)}")
    try:
        from sklearn import datasets
    except ImportError:
        raise UsageError(
            f"'sklearn:{name}' comes with scikit-learn, which is not installed; run pip install 'weft[images]'"
        ) from None
    bunch = getattr(datasets, f"load_{name}")()
    values = bunch.data.astype(np.float64)
    # columns of different units
    values = (values - values.mean(0)) / values.std(0)
    return LabelledSamples(values.astype(np.float32), bunch.target.astype(np.int64))
