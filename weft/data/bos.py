"""Set whether texts begin with the BOS token: as the tokenizer's post-processor says, unless ``data.bos`` overrules it.

The rule is stored in the tokenizer, which a run saves with its checkpoints and exports. So training documents,
validation, questions, prompts, and other programs that read the export treat texts alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import tokenizers

from weft.cache import digest
from weft.errors import UsageError

if TYPE_CHECKING:
    from weft.data.tokenizer import Tokenizer

#: As ``data.bos`` has it.
Bos = bool | Literal["auto", "prompts"]
#: A post-processor of ``tokenizer.json``, and a piece of one's template.
Processor = dict[str, Any]
Piece = dict[str, Any]
#: Documents of which it is looked up how they begin.
LOOKED_AT = 1000


def with_bos(tokenizer: Tokenizer, bos: Bos) -> Tokenizer:
    """Return ``tokenizer``, changed so that it adds the BOS token to texts or does not, as ``bos`` says.

    ``bos``: the value of ``data.bos``. With True the BOS token is added to every text, with False to none; "auto" and
    "prompts" leave the tokenizer unchanged. Raises :class:`UsageError` if ``bos`` is True and the tokenizer has no BOS
    token.
    """
    if isinstance(bos, str) or bos == bool(tokenizer.opening):
        return tokenizer
    number, name = tokenizer.bos, tokenizer.name_of(tokenizer.bos)
    if bos and (tokenizer.model is None or number is None or name is None):
        raise UsageError(
            "data.bos = true, but the tokenizer has no token that begins a text; name one as 'bos_token' in "
            "tokenizer_config.json beside it, or leave data.bos out"
        )
    assert tokenizer.model is not None
    tree = json.loads(tokenizer.model.to_str())
    before = tree["post_processor"]
    tree["post_processor"] = (
        _with_opening(before, str(name), number or 0)
        if bos
        else _without_opening(before)
    )
    model = tokenizers.Tokenizer.from_str(json.dumps(tree))
    model.encode_special_tokens = True
    return replace(
        tokenizer, model=model, fingerprint=digest(model.to_str(), tokenizer.eos)
    )


def document_opening(tokenizer: Tokenizer, bos: Bos) -> list[int]:
    """Return the token ids that begin every document of plain text.

    They are the ids of ``tokenizer.opening``, or none if ``bos`` is "prompts".
    """
    return [] if bos == "prompts" else tokenizer.opening


def begins_otherwise(
    ids: np.ndarray, starts: np.ndarray, opening: Sequence[int]
) -> bool:
    """Return whether some tokenized documents begin with another token than the first of ``opening``.

    ``ids``: int ``[tokens]``, the token ids of all documents. ``starts``: int64 ``[documents]``, index of each
    document's first token in ``ids``. ``opening``: the ids that should begin every document; if there are none, the
    result is False. Only about :data:`LOOKED_AT` documents, evenly spaced, are checked.
    """
    seen = starts[:: max(1, len(starts) // LOOKED_AT)]
    return bool(opening) and bool((ids[seen] != opening[0]).any())


def _with_opening(processor: Processor | None, name: str, number: int) -> Processor:
    """Return a post-processor, as ``tokenizer.json`` has it, that also writes the token ``name`` before a text."""
    known = _known(name, number)
    if processor is None:
        return _template(
            [_special(name), _text("A")],
            [_special(name), _text("A"), _text("B")],
            known,
        )
    kind = processor["type"]
    if kind == "TemplateProcessing":
        single, pair = ([_special(name), *processor[key]] for key in ("single", "pair"))
        return _template(single, pair, processor["special_tokens"] | known)
    parts = list(processor["processors"]) if kind == "Sequence" else [processor]
    # Of two templates the second would take what the first has written for two texts.
    at = next(
        (i for i, part in enumerate(parts) if part["type"] == "TemplateProcessing"),
        len(parts),
    )
    parts[at:] = [
        _with_opening(parts[at] if at < len(parts) else None, name, number),
        *parts[at + 1 :],
    ]
    return {"type": "Sequence", "processors": parts}


def _without_opening(processor: Processor | None) -> Processor | None:
    """Return a post-processor without the tokens that it writes before a text."""
    if processor is None:
        return None
    kind = processor["type"]
    if kind == "Sequence":
        parts = [_without_opening(part) for part in processor["processors"]]
        return processor | {"processors": [part for part in parts if part is not None]}
    # a token before, and one behind
    if kind in ("BertProcessing", "RobertaProcessing"):
        name, number = processor["sep"]
        single = [_text("A"), _special(name)]
        return _template(
            single, [*single, _text("B"), _special(name)], _known(name, number)
        )
    if kind != "TemplateProcessing":
        return processor
    return processor | {
        key: _from_text_on(processor[key]) for key in ("single", "pair")
    }


def _template(
    single: list[Piece], pair: list[Piece], known: dict[str, Any]
) -> Processor:
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": known,
    }


def _known(name: str, number: int) -> dict[str, Any]:
    return {name: {"id": name, "ids": [number], "tokens": [name]}}


def _special(name: str) -> Piece:
    return {"SpecialToken": {"id": name, "type_id": 0}}


def _text(which: str) -> Piece:
    return {"Sequence": {"id": which, "type_id": 0}}


def _from_text_on(pieces: list[Piece]) -> list[Piece]:
    first = next((i for i, piece in enumerate(pieces) if "Sequence" in piece), 0)
    return pieces[first:]
