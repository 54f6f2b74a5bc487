"""Apply what ``tokenizer_config.json`` says of tokens beside ``tokenizer.json``, as transformers does.

transformers builds a tokenizer from both files. The second one may have tokens that the first lacks, and other flags
for those that both have; without them a chat template's ``<|im_start|>`` would be encoded as plain text.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

from weft.errors import WeftError

#: Where special tokens stand that have no key of their own: in lists, or in objects whose keys chat templates know.
_OTHERS = (
    "extra_special_tokens",
    "additional_special_tokens",
    "model_specific_special_tokens",
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def named_tokens(model: Tokenizer, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of ``model`` that chat templates know by a name, such as ``unk_token``.

    ``settings``: content of ``tokenizer_config.json``.
    """
    return {
        key: token.content
        for key, token in _special_tokens(settings)
        if key and model.token_to_id(token.content) is not None
    }


def with_configured_tokens(
    model: Tokenizer, settings: Mapping[str, Any], templates: Iterable[str]
) -> Tokenizer:
    """Return ``model``, the tokenizer of ``tokenizer.json``, with the tokens and flags of ``tokenizer_config.json``.

    A special token that neither file gives an id gets one only if a chat template writes it. Otherwise an unused name,
    such as that of a padding token, would make the vocabulary larger than the model's. An id in
    ``tokenizer.json`` counts more than one in the configuration. Raises :class:`WeftError` for a token that is in the
    configuration alone and in use, and cannot have the id that stands there.

    ``settings``: content of ``tokenizer_config.json``. ``templates``: texts of the chat templates.
    """
    known, written = model.get_added_tokens_decoder(), "".join(templates)
    stated = settings.get("added_tokens_decoder") or {}
    tokens = {int(number): _token(given) for number, given in stated.items()}
    changed = {i: t for i, t in tokens.items() if repr(known.get(i)) != repr(t)}
    named = {token.content for key, token in _special_tokens(settings) if key}
    new = [i for i, t in changed.items() if model.token_to_id(t.content) is None]
    free = max(model.get_vocab().values(), default=-1) + 1 if new else 0
    for number in sorted(new):
        name = changed[number].content
        if number == free:
            free += 1
        elif name in written or name in named:
            raise WeftError(
                f"tokenizer_config.json gives {name!r} the id {number}, and the next free one is {free}"
            )
        else:  # nothing uses it
            del changed[number]
    model.add_tokens([token for _, token in sorted(changed.items())])
    missing = _missing(model, settings, written)
    model.add_tokens(missing)
    # read anew, as a token whose flags have changed would count as before, too
    return Tokenizer.from_str(model.to_str()) if changed or missing else model


def _missing(
    model: Tokenizer, settings: Mapping[str, Any], written: str
) -> list[AddedToken]:
    """Return the special tokens of ``settings`` that ``model`` lacks, and that it can have.

    ``written``: text of the chat templates.
    """
    added = {token.content for token in model.get_added_tokens_decoder().values()}
    missing: dict[str, AddedToken] = {}
    for key, token in _special_tokens(settings):
        name = token.content
        # an added token keeps its own flags: one that is not special is part of what is written, such as <think>
        if name not in added and (
            model.token_to_id(name) is not None
            or name in written
            or (key and key in written)
        ):
            missing[name] = token
    return list(missing.values())


def _special_tokens(settings: Mapping[str, Any]) -> Iterator[tuple[str, AddedToken]]:
    """Yield the special tokens of ``tokenizer_config.json``, each with its key for chat templates or with ""."""
    given = [(key, settings[key]) for key in settings if key.endswith("_token")]
    for key in _OTHERS:
        more = settings.get(key)
        if isinstance(more, Mapping):
            given += more.items()
        elif isinstance(more, list):
            given += [("", token) for token in more]
    for key, token in given:
        if isinstance(token, str) and token:
            yield key, AddedToken(token, normalized=False, special=True)
        elif isinstance(token, Mapping) and token.get("content"):
            yield key, _token({**token, "special": True})


def _token(given: Mapping[str, Any]) -> AddedToken:
    flags = {key: bool(given[key]) for key in _FLAGS if key in given}
    return AddedToken(given["content"], **flags)
