"""``weft serve`` of a diffusion transformer."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from weft.cli.console import warn
from weft.cli.engine_options import read_engine_options
from weft.errors import UsageError, WeftError

if TYPE_CHECKING:
    from weft.cli.front_door import FrontDoor
    from weft.generate.open_engine import EngineOptions

#: Options of an engine that images heed.
HEEDED = {"checkpoint", "requests", "waiting", "ema", "plugins"}


def makes_pictures(checkpoint: str) -> bool:
    """Return whether the model called ``checkpoint`` makes images. If it cannot be opened, the result is False."""
    from weft.checkpoint.weights import shape_named

    try:
        return shape_named(checkpoint).kind == "diffusion"
    except WeftError:
        return False


def check_heeded(options: "EngineOptions", others: Mapping[str, Any]) -> None:
    """Raise :class:`UsageError` for the first given option that only models of texts use.

    ``options``: options of the engine. ``others``: values of further options of this kind, by name; empty values count
    as not given.
    """
    plain = read_engine_options(options.checkpoint)
    given = [
        f"--{field.name.replace('_', '-')}"
        for field in fields(options)
        if field.name not in HEEDED
        and getattr(options, field.name) != getattr(plain, field.name)
    ]
    given += [name for name, value in others.items() if value]
    if given:
        raise UsageError(
            f"{given[0]} is of models that write texts, and {options.checkpoint} makes images; leave it out"
        )


def serve_pictures(options: "EngineOptions", name: str, door: "FrontDoor") -> int:
    """Serve a model of images over HTTP until the process is told to end; return the exit code.

    ``options``: options of the engine, with the model. ``name``: the model's name for clients. ``door``: where to
    listen.
    """
    import torch

    from weft.diffusion.denoiser import open_denoiser
    from weft.diffusion.picture_engine import PictureEngine
    from weft.serve.picture_server import PictureServer
    from weft.serve.picture_service import PictureService

    device = "cuda" if torch.cuda.is_available() else "cpu"
    denoiser = open_denoiser(options.checkpoint, device, warn, options.ema)
    listening = door.listening()
    service = PictureService(PictureEngine(denoiser, options.requests), options.most)
    server = PictureServer(service, denoiser, name, door.keys)
    batch = f"{options.requests} images of {server.size} in a batch"
    front = door.front(server, listening, f"POST /v1/images/generations, {batch}")
    with suppress(KeyboardInterrupt):  # which comes again after the last answer
        front.run(sockets=[listening])
    service.close()
    return 0
