"""Reads what ``weft data run`` has written: a recipe names the folder, and the rest is known."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.paths import home_path

#: Files of a data run: what it has come to, the file written last, and the folder of intermediate files.
CARD, MANIFEST, UNFINISHED = "card.json", "manifest.json", ".work"


def read_card(folder: Path) -> dict[str, Any] | None:
    """Return the card of the data run that has written ``folder``, or None if no data run has.

    Raises :class:`WeftError` if the run has not ended, or if the card is damaged.
    """
    if not folder.is_dir():
        return None
    begun = (folder / UNFINISHED / "lock").is_file()
    if begun and not (folder / MANIFEST).is_file():
        raise WeftError(
            f"'weft data run' into {folder} has not ended; run the same command again: it goes on from where it was"
        )
    if not (folder / CARD).is_file():
        return None
    try:
        card = json.loads((folder / CARD).read_bytes())
    except (OSError, ValueError) as error:
        if not begun:
            return None
        raise WeftError(f"{folder / CARD} is damaged ({error}); run 'weft data run' again") from None  # fmt: skip
    is_ours = isinstance(card, dict) and card.get("weft") == "data run"
    return card if is_ours else None


def name_curated_data(tree: dict[str, Any], chosen: set[str]) -> None:
    """Set kind, path and field of those sources of the recipe ``tree`` whose path is the folder of a data run.

    Token files are read if the recipe's tokenizer made them, or if the recipe names no tokenizer and starts from no
    model; else the documents are read. ``chosen``: keys that the command line has set. If ``data.kind`` is among them,
    nothing is changed.
    """
    data = tree.get("data")
    if not isinstance(data, dict) or "data.kind" in chosen:
        return
    sources = data.get("sources", [data])
    if not isinstance(sources, list | tuple):
        return
    for source in sources:
        path = source.get("path") if isinstance(source, dict) else None
        if not isinstance(path, str) or "://" in path:
            continue
        folder = home_path(path)
        card = read_card(folder)
        if card is None:
            continue
        for key in ("kind", "path", "field", "form"):
            source.pop(key, None)
        if len(sources) == 1 and _reads_tokens(tree, data, card):
            tokens = str(folder / "tokens")
            source.update(kind="tokens", path=tokens)
            data["tokenizer"] = tokens
        else:
            source.update(
                kind=card["kind"], path=str(folder / "documents"), field=card["field"]
            )


def _reads_tokens(
    tree: Mapping[str, Any], data: Mapping[str, Any], card: Mapping[str, Any]
) -> bool:
    if not card["tokens"]:
        return False
    asked = data.get("tokenizer", "")
    model = tree.get("model")
    starts_from = isinstance(model, dict) and model.get("from")
    return bool(asked == card["tokenizer"] or not (asked or starts_from))
