"""What comes with a model beside its weights, and is written again as it came: ``config.json`` and its neighbours.

A run keeps these files in its checkpoints. An export writes them again, but for what training has changed: a
field that Weft has no use for (a context length, a sampling default, somebody's note) is neither lost nor made up.
"""

import json
from collections.abc import Mapping
from typing import Any

from weft.errors import WeftError
from weft.recipe import ModelShape

CONFIG, GENERATION = "config.json", "generation_config.json"
#: Ids of special tokens, which stand in both of these files.
TOKEN_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
#: What transformers 5 and 4 call the type of the weights.
DTYPES = ("dtype", "torch_dtype")
#: Names of one thing, of which a configuration may have several.
SYNONYMS = (("num_local_experts", "num_experts", "n_routed_experts"),)


def carried_config(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The ``config.json`` among a model's files; empty if there is none."""
    return _object(files, CONFIG)


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except ValueError:
        raise WeftError(
            f"{name} is no JSON; export or download the model again"
        ) from None
    return content if isinstance(content, dict) else {}


def context_length(files: Mapping[str, bytes]) -> int | None:
    """How many tokens a model can see at most, as the ``config.json`` among its files says; None if nobody says it.

    Of a model whose weights a run of Weft's began anew nobody does: rotary embedding has no end, and how well such a
    model goes on behind the ``data.seq_len`` that it has learned with is for its owner to judge. Scaling of rotary
    frequencies reaches further than ``max_position_embeddings`` in configurations that name the length from before.
    """
    config = carried_config(files)
    length = config.get("max_position_embeddings")
    if not isinstance(length, int) or length <= 0:
        return None
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope = rope if isinstance(rope, dict) else {}
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    if not isinstance(factor, int | float):
        return length
    if kind == "yarn":
        return max(
            length,
            round(factor * (rope.get("original_max_position_embeddings") or length)),
        )
    return (
        round(factor * length)
        if kind == "linear" and "gemma" not in str(config.get("model_type"))
        else length
    )


def carried_dtype(files: Mapping[str, bytes]) -> str | None:
    """The type of the weights, as the ``config.json`` among a model's files says (``bfloat16``)."""
    config = carried_config(files)
    given = next((str(config[name]) for name in DTYPES if config.get(name)), None)
    return None if given is None else given.removeprefix("torch.")


def files_of_run(
    carried: Mapping[str, bytes], own: Mapping[str, bytes], same_tokenizer: bool
) -> dict[str, bytes]:
    """The files that a run's checkpoints hold.

    ``carried``: files of the model that the run starts from; ``own``: files of the run's tokenizer;
    ``same_tokenizer``: whether it is the model's. Another tokenizer brings its own files, and its ids of special
    tokens are written to the configurations.
    """
    if same_tokenizer:  # ids that no file says yet are all that the tokenizer adds
        return {
            name: content for name, content in own.items() if name == GENERATION
        } | dict(carried)
    files, tokens = (
        dict(own),
        {
            key: value
            for key, value in _object(own, GENERATION).items()
            if key in TOKEN_IDS
        },
    )
    if CONFIG in carried:
        config = carried_config(carried)
        files[CONFIG] = as_json(
            config
            | {
                key: tokens.get(key)
                for key in TOKEN_IDS
                if key in config or key in tokens
            }
        )
    if GENERATION in carried or tokens:
        sampling = {
            key: value
            for key, value in _object(carried, GENERATION).items()
            if key not in TOKEN_IDS
        }
        files[GENERATION] = as_json(sampling | tokens)
    return files


def as_json(content: Any) -> bytes:
    """The content of a JSON file."""
    return (json.dumps(content, indent=2) + "\n").encode()


def exported_config(
    shape: ModelShape,
    dtype: object,
    files: Mapping[str, bytes],
    max_positions: int | None = None,
) -> dict[str, Any]:
    """The ``config.json`` of a model of ``shape`` with weights of ``dtype``, whose other files are ``files``.

    Where these have a ``config.json``, it is that, with the fields that stand for what has changed since. Otherwise it
    is made from ``shape``; ``max_positions`` is the context length then, as far as one is known.
    """
    # which a run that keeps what it was given does not need
    from weft.shapes.config import config_from_shape, shape_from_fields

    tokens = {
        key: value
        for key, value in _object(files, GENERATION).items()
        if key in TOKEN_IDS
    }
    now = config_from_shape(shape, dtype, tokens, max_positions)
    carried = carried_config(files)
    if not carried:
        return now
    kind = str(dtype).removeprefix("torch.")
    before = config_from_shape(
        shape_from_fields(carried, CONFIG), dtype, tokens, max_positions
    )
    changed = {
        key
        for key in (*before, *now)
        if key not in DTYPES and before.get(key, ...) != now.get(key, ...)
    }
    config = {
        key: value for key, value in carried.items() if key not in changed or key in now
    }
    config |= {key: now[key] for key in now if key in changed}
    for names in SYNONYMS:
        config |= {
            name: now[key]
            for key in names
            if key in changed and key in now
            for name in names
            if name in config
        }
    config |= {name: kind for name in DTYPES if name in config}
    # what was stored in 8 bits is written as numbers
    config.pop("quantization_config", None)
    if _meaning(config, dtype, tokens, max_positions) == now:
        return config
    # Some field goes by another name there. What only the carried one has comes along all the same.
    return {
        key: value
        for key, value in carried.items()
        if key not in before and key != "quantization_config"
    } | now


def _meaning(config: Mapping[str, Any], *more: Any) -> dict[str, Any]:
    """What Weft would write for the model that ``config`` describes; empty if it describes none."""
    from weft.shapes.config import config_from_shape, shape_from_fields

    try:
        return config_from_shape(shape_from_fields(config, CONFIG), *more)
    except WeftError:
        return {}
