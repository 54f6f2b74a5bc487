"""What a model card says of federated training: whose data the model learned from, and what protects them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def federated_lines(recipe: Mapping[str, Any], kept: Mapping[str, Any]) -> list[str]:
    """Return lines of Markdown about the clients of a federated run and the privacy of their data, for a model card.

    ``recipe``: the recipe's section ``[federated]``. ``kept``: JSON values of the run's loader in the checkpoint.
    """
    about = kept.get("federated", {})
    changes = kept.get("federated_version", 0)
    by = f" by {about['clients']:,} clients" if about.get("clients") else ""
    lines = [
        "",
        "## Whose data",
        "",
        f"Changed {changes:,} times{by} (`{recipe.get('policy', 'fedavg')}`), which sent what they had learned and not "
        "their data.",
        "",
    ]
    clip, noise = recipe.get("clip", 0), recipe.get("noise", 0)
    if recipe.get("secure"):
        lines.append("- Secure sums: the server saw sums of updates, and no client's own.")  # fmt: skip
    else:
        lines.append("- No secure sums: the server saw each client's updates, which tell of its data.")  # fmt: skip
    if noise and "epsilon" in about:
        lines.append(
            f"- Differential privacy of clients: epsilon {about['epsilon']:.3g} at delta {recipe.get('delta', 1e-5):g} "
            f"(updates clipped to {clip:g}, noise {noise:g})."
        )
    else:
        lines.append("- No differential privacy: the model may repeat what a client's data say.")  # fmt: skip
    return lines
