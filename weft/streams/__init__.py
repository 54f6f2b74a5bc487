"""Streams: simulators send samples to a training while they run, and the training draws from what has come so far.

A simulator needs only :func:`producer`::

    from weft.streams import producer

    with producer() as stream:
        for step in range(steps):
            stream.send({"parameters": parameters, "field": field})
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.streams.stream_producer import StreamProducer as StreamProducer
    from weft.streams.stream_producer import producer as producer
    from weft.streams.trained_surrogate import Surrogate as Surrogate
    from weft.streams.trained_surrogate import open_surrogate as open_surrogate

#: The file of every public name, in this folder. A simulator does not wait for PyTorch.
_FILES = {
    "StreamProducer": "stream_producer",
    "producer": "stream_producer",
    "Surrogate": "trained_surrogate",
    "open_surrogate": "trained_surrogate",
}


def __getattr__(name: str) -> Any:
    """Public names, whose files are read when the names are asked for."""
    if name not in _FILES:
        raise AttributeError(f"module 'weft.streams' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"weft.streams.{_FILES[name]}"), name)
