"""Model card of an export: what the run was, and which documents it has read how often."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.checkpoint.hub import local_path
from weft.checkpoint.store import load_newest
from weft.checkpoint.weights import is_foreign
from weft.data.read_so_far import read_so_far
from weft.encodable import encodable

if TYPE_CHECKING:
    from weft.checkpoint.load import StoredCheckpoint

#: File of the card, which hubs show.
CARD_FILE = "README.md"


def write_model_card(checkpoint: str, folder: Path) -> None:
    """Write ``README.md`` to the ``folder`` of an export, if the checkpoint records on which data its run was trained.

    ``checkpoint``: address of the run or the checkpoint that is exported.
    """
    where = local_path(checkpoint)
    if is_foreign(where):
        return
    stored, _ = load_newest([where], lambda stored: None, lambda line: None)
    if (text := model_card(stored)) is not None:
        # names of files may hold bytes that are no UTF-8
        (folder / CARD_FILE).write_text(encodable(text), encoding="utf-8")


def model_card(stored: StoredCheckpoint) -> str | None:
    """Return the model card of the checkpoint ``stored`` as Markdown; None if the checkpoint does not record which data
    its run has read.
    """
    meta: dict[str, Any] = stored.meta
    progress, recipe = meta["progress"], meta["recipe"]
    loader = progress.get("loader", {})
    federated = recipe.get("federated") or {}
    # a server measures on its own data, and learns from none
    sources = [] if federated.get("listen") else read_so_far(loader)
    if not sources and not federated.get("listen"):
        return None
    origin = recipe["model"].get("from") or recipe["model"].get("origin")
    begun = f", from `{origin}`" if origin else ""
    lines = [
        f"# {recipe.get('name') or 'model'}",
        "",
        f"Trained by Weft for {progress['step']:,} steps and {progress['tokens']:,} tokens{begun}.",
    ]
    if federated.get("listen"):
        from weft.checkpoint.federated_card import federated_lines

        lines += federated_lines(federated, loader)
    if not sources:
        return "\n".join([*lines, ""])
    lines += [
        "",
        "## What was read",
        "",
        "| source | documents | trained on | tokens | epochs read | tokens read |",
        "|---|---|---|---|---|---|",
    ]
    for about in sources:
        lines.append(
            f"| {about['name']} | {about['documents']:,} | {about['trained_documents']:,} | {about['tokens']:,} "
            f"| {about['epochs']:.3g} | {about['tokens_read']:,} |"
        )
    dropped = any(about["lines"][1:] for about in sources)
    lines += ["", "Written by `weft data run`:", ""] if dropped else []
    for about in sources:
        lines += [f"- `{about['name']}`, {line}" for line in about["lines"][1:]]
    facts = json.dumps([{k: v for k, v in s.items() if k != "lines"} for s in sources])
    return "\n".join([*lines, "", f"<!-- weft: {facts} -->", ""])
