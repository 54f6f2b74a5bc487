"""Nested values with tensors in them, in files that nobody unpickles: JSON beside safetensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from weft.errors import WeftError
from weft.federated.written_file import writing_file

#: The key of a JSON object that stands for a tensor, a tuple or a set.
TENSOR, TUPLE, SET, PAIRS = "tensor!", "tuple!", "set!", "pairs!"


def save_values(path: Path, value: Any) -> None:
    """Write ``value`` to the file ``path``: dictionaries, lists, tuples, sets, tensors and plain values, in any
    nesting.

    The file is replaced atomically: readers see the old file or the complete new one. Raises
    :class:`weft.federated.written_file.FileNotWritten` if the disk refuses.
    """
    from safetensors.torch import save_file

    tensors = dict[str, torch.Tensor]()
    text = json.dumps(_to_json(value, tensors))
    new = path.with_suffix(".new")
    with writing_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors or {"": torch.zeros(0)}, new, {"values": text})
        os.replace(new, path)


def load_values(path: Path) -> Any:
    """Read a value that :func:`save_values` has written.

    Raises :class:`WeftError` if the file is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            value = json.loads(file.metadata()["values"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise WeftError(f"cannot read {path}: {error}") from None
    return _from_json(value, tensors)


def _to_json(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {TENSOR: name}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _to_json(each, tensors) for key, each in value.items()}
        return {
            PAIRS: [
                [_to_json(k, tensors), _to_json(v, tensors)] for k, v in value.items()
            ]
        }
    if isinstance(value, tuple):
        return {TUPLE: [_to_json(each, tensors) for each in value]}
    if isinstance(value, set | frozenset):
        return {SET: [_to_json(each, tensors) for each in sorted(value)]}
    if isinstance(value, list):
        return [_to_json(each, tensors) for each in value]
    return value


def _from_json(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_from_json(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key == TENSOR:
            return tensors[inner]
        if key == TUPLE:
            return tuple(_from_json(inner, tensors))
        if key == SET:
            return set(_from_json(inner, tensors))
        if key == PAIRS:
            return {_from_json(k, tensors): _from_json(v, tensors) for k, v in inner}
    return {key: _from_json(each, tensors) for key, each in value.items()}
