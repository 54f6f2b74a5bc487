"""What pruning keeps: hard, easy and random digits at five shares, and dense beside wide clusters.

    python bench/pruning.py [--python VENV/bin/python] [--draws 3] [--json bench/results/pruning.json]

The digits are those of scikit-learn, which may stand in a venv of its own (``--python``): 1,200 to choose from, 597 to
judge on, the accuracy of small networks, once with the plain choice and once with a floor for each class, half of
what an equal share would be. The clusters are ten Gaussian classes, five dense and five wide, of 50
examples each, once with wide ones that touch others and once apart; 20 % are kept, as many of each cluster or by
density, the farthest or random ones inside a cluster, and the class of the nearest kept example is judged.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step import machine

from weft.curation.best_documents import Keep, choose_best, score_order
from weft.curation.concept_clusters import (
    keep_of_clusters,
    project_counts,
    prune_clusters,
)
from weft.curation.example_difficulty import (
    el2n_scores,
    forgetting_counts,
    prototype_distances,
)
from weft.curation.small_network import network_accuracy

RESULTS = Path(__file__).parent / "results" / "pruning.json"
SHARES = (1.0, 0.5, 0.25, 0.1, 0.05)
TRAINED = 1200
#: Floor of each class, as a share of its equal part.
BALANCE = 0.5
CHOICES: dict[str, Keep] = {"hard": "high", "easy": "low", "random": "random"}
#: Distance of the centres of clusters, and width of the wide ones.
CLUSTERS = {"touching": (3.0, 1.2), "apart": (6.0, 1.5)}

Examples = tuple[np.ndarray, np.ndarray]

#: Runs in a Python that has scikit-learn.
_LOAD = """
import sys, numpy
from sklearn.datasets import load_digits
digits = load_digits()
numpy.savez(sys.argv[1], features=digits.data.astype("float32"), labels=digits.target.astype("int64"))
"""


def digits(python: str) -> Examples:
    """Vectors of 64 pixels and classes of scikit-learn's digits, in an order that is drawn once."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "digits.npz")
        # -P: scripts beside this file have names of its packages
        subprocess.run([python, "-P", "-c", _LOAD, str(file)], check=True, cwd=folder)
        with np.load(file) as stored:
            features, labels = stored["features"], stored["labels"]
    order = np.random.default_rng(0).permutation(len(labels))
    return features[order], labels[order]


def pruned_digits(examples: Examples, draws: int, balance: float) -> dict[str, Any]:
    """Accuracy in percent by metric, share and choice: the mean over draws of the seeds.

    ``balance``: what each class keeps at least, as a share of what it would keep if all classes kept equally many.
    """
    features, labels = examples
    names = [f"{i:04}" for i in range(TRAINED)]
    x, y = features[:TRAINED], labels[:TRAINED]
    judged = features[TRAINED:], labels[TRAINED:]
    metrics: dict[str, Callable[[int], np.ndarray]] = {
        "el2n": lambda seed: el2n_scores(x, y, seed=seed),
        "forgetting": lambda seed: forgetting_counts(x, y, seed=seed),
        "prototypes": lambda seed: prototype_distances(x, 20, seed),
    }
    table: dict[str, Any] = {}
    for metric, scored in metrics.items():
        table[metric] = {}
        for share in SHARES:
            row: dict[str, list[float]] = {choice: [] for choice in CHOICES}
            fewest = TRAINED
            for seed in range(draws):
                scores = scored(seed)
                for choice, keep in CHOICES.items():
                    order = score_order(scores, names, keep, seed)
                    count = round(share * TRAINED)
                    floor = int(balance * count / 10)
                    kept = choose_best(order, count, y.astype(np.str_), floor)
                    if choice != "random":
                        sizes = np.bincount(y[kept], minlength=10)
                        fewest = min(fewest, int(sizes.min()))
                    right = network_accuracy(x[kept], y[kept], *judged, 3, 300, seed)
                    row[choice].append(100 * right)
            figures = {name: round(float(np.mean(v)), 1) for name, v in row.items()}
            table[metric][f"{share:.0%}"] = figures | {"fewest_of_a_class": fewest}
            print(
                metric,
                balance,
                f"{share:.0%}",
                table[metric][f"{share:.0%}"],
                flush=True,
            )
    return table


def gaussians(seed: int, each: int, apart: float, wide: float) -> Examples:
    """Examples of five dense and five wide classes."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(10), each)
    widths = np.where(labels < 5, 0.1, wide)[:, None]
    features = apart * np.eye(10, 16)[labels] + widths * rng.normal(
        size=(10 * each, 16)
    )
    return features.astype(np.float32), labels


def one_neighbour(trained: Examples, judged: Examples) -> float:
    """Share of the judged examples whose nearest trained example has their class."""
    distances = torch.cdist(torch.from_numpy(judged[0]), torch.from_numpy(trained[0]))
    return float((trained[1][distances.argmin(1).numpy()] == judged[1]).mean())


def pruned_clusters(draws: int, apart: float, wide: float) -> dict[str, float]:
    """Accuracy in percent with the examples that density keeps, with as many of each cluster, and with random ones."""
    accuracies: dict[str, list[float]] = {}
    for seed in range(draws):
        features, labels = gaussians(seed, 50, apart, wide)
        judged = gaussians(1000 + seed, 200, apart, wide)
        total = len(labels) // 5
        pruned = prune_clusters(features, total, 10, 0.1, seed=seed)
        sizes = np.bincount(pruned.labels, minlength=10)
        uniform = project_counts(np.full(10, total / 10), np.zeros(10), sizes, total)
        drawn = np.random.default_rng(seed).random(len(labels))
        counts = {"density": pruned.counts, "uniform": uniform}
        firsts = {"far": pruned.distances, "random": drawn}
        kept = {
            f"{name}_{inside}": keep_of_clusters(pruned.labels, count, first)
            for name, count in counts.items()
            for inside, first in firsts.items()
        }
        kept["random"] = drawn >= np.sort(drawn)[-total]
        for name, mask in kept.items():
            right = one_neighbour((features[mask], labels[mask]), judged)
            accuracies.setdefault(name, []).append(100 * right)
    return {name: round(float(np.mean(v)), 1) for name, v in accuracies.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    figures: dict[str, Any] = {"machine": machine(), "clusters": {}}
    for name, (apart, wide) in CLUSTERS.items():
        figures["clusters"][name] = pruned_clusters(12, apart, wide)
        print("clusters", name, figures["clusters"][name], flush=True)
    examples = digits(args.python)
    figures["digits"] = pruned_digits(examples, args.draws, 0.0)
    figures["digits_with_floor"] = pruned_digits(examples, args.draws, BALANCE)
    args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
