"""Files that come with a model beside its weights (``config.json`` and its neighbours) and are written again with it.

A run keeps these files in its checkpoints. An export writes them unchanged, except for fields that training has
changed: a field that Weft has no use for (a context length, a sampling default, a note) is neither lost nor invented.
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
    """Return the ``config.json`` among a model's files; empty if there is none."""
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
    """Return the context length that the ``config.json`` among a model's ``files`` states; None if it states none.

    A model that Weft has trained from random weights states none: its rotary embedding sets no limit, and the user must
    judge how well the model works beyond ``data.seq_len``. If rotary frequencies are scaled by a factor (YaRN, linear),
    the result is the length after scaling, also where the field ``max_position_embeddings`` holds the length before it.
    """
    config = carried_config(files)
    length = config.get("max_position_embeddings")
    if not isinstance(length, int) or length <= 0:
        return None
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    kind, factor = rope.get("rope_type", rope.get("type")), rope.get("factor")
    if not isinstance(factor, int | float):
        return length
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or length
        return max(length, round(factor * original))
    if kind == "linear" and "gemma" not in str(config.get("model_type")):
        return round(factor * length)
    return length


def carried_dtype(files: Mapping[str, bytes]) -> str | None:
    """Return the name of the weights' type, such as ``bfloat16``, from the ``config.json`` in ``files``.

    None if the file or the name is missing.
    """
    config = carried_config(files)
    given = next((str(config[name]) for name in DTYPES if config.get(name)), None)
    return None if given is None else given.removeprefix("torch.")


def files_of_run(
    carried: Mapping[str, bytes], own: Mapping[str, bytes], same_tokenizer: bool
) -> dict[str, bytes]:
    """Return the files that a run writes beside the weights in its checkpoints.

    ``carried``: files of the model that the run starts from; ``own``: files of the run's tokenizer. ``same_tokenizer``:
    whether the run's tokenizer is the model's. If it is not, the result has the run's tokenizer files in place of the
    model's, and the configurations get the ids of its special tokens.
    """
    if same_tokenizer:  # ids that no file says yet are all that the tokenizer adds
        return {n: content for n, content in own.items() if n == GENERATION} | {
            **carried
        }
    files, tokens = dict(own), _token_ids(own)
    if CONFIG in carried:
        config = carried_config(carried)
        known = [key for key in TOKEN_IDS if key in config or key in tokens]
        files[CONFIG] = as_json(config | {key: tokens.get(key) for key in known})
    if GENERATION in carried or tokens:
        sampling = _object(carried, GENERATION)
        others = {key: sampling[key] for key in sampling if key not in TOKEN_IDS}
        files[GENERATION] = as_json(others | tokens)
    return files


def _token_ids(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the ids of special tokens in a model's ``generation_config.json``."""
    fields = _object(files, GENERATION)
    return {key: fields[key] for key in fields if key in TOKEN_IDS}


def as_json(content: Any) -> bytes:
    """Return ``content`` as the bytes of a JSON file."""
    return (json.dumps(content, indent=2) + "\n").encode()


def exported_config(
    shape: ModelShape,
    dtype: object,
    files: Mapping[str, bytes],
    max_positions: int | None = None,
) -> dict[str, Any]:
    """Return the ``config.json`` of a model of ``shape`` with weights of ``dtype``.

    ``files``: the model's other files. If they include a ``config.json``, the result is a copy of it, in which only
    fields differ that training has changed. Otherwise the result is made from ``shape``. ``max_positions`` is then its
    context length; None: unknown.
    """
    # which a run that keeps what it was given does not need
    from weft.shapes.config import config_from_shape, shape_from_fields

    def written(described: ModelShape) -> dict[str, Any]:
        return config_from_shape(described, dtype, _token_ids(files), max_positions)

    now, carried = written(shape), carried_config(files)
    if not carried:
        return now
    before = written(shape_from_fields(carried, CONFIG))
    changed = {
        key
        for key in (*before, *now)
        if key not in DTYPES and before.get(key, ...) != now.get(key, ...)
    }
    config = {key: carried[key] for key in carried if key not in changed or key in now}
    config |= {key: now[key] for key in now if key in changed}
    for names in SYNONYMS:
        for key in changed.intersection(names, now):
            config |= {name: now[key] for name in names if name in config}
    kind = str(dtype).removeprefix("torch.")
    config |= {name: kind for name in DTYPES if name in config}
    # what was stored in 8 bits is written as numbers
    config.pop("quantization_config", None)
    try:
        if written(shape_from_fields(config, CONFIG)) == now:
            return config
    except WeftError:  # it describes no model
        pass
    # Some field goes by another name there. What only the carried one has comes along all the same.
    extra = carried.keys() - before.keys() - {"quantization_config"}
    return {key: carried[key] for key in carried if key in extra} | now
