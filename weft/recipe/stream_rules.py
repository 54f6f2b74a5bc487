"""Rules for what a recipe with ``[stream]`` may set."""

from __future__ import annotations

from typing import Any

from weft.registry import find

#: Sections that mean nothing in a run whose samples are arrays.
NOT_BESIDE_STREAM = ("adapter", "data", "tasks", "rl", "roles", "generate", "control")


def check_beside_stream(recipe: Any) -> None:
    """Raise :class:`ValueError` for the first setting of ``recipe`` that cannot be combined with ``[stream]``.

    The same is checked for models of arrays, which learn from streams only.
    """
    stream = recipe.stream
    if stream is None:
        raise ValueError(
            "model.inputs are arrays, which only simulators send; add [stream], or leave model.inputs and "
            "model.outputs out"
        )
    if not recipe.model.inputs:
        raise ValueError(
            "[stream] has samples of arrays; set model.kind, model.inputs and model.outputs"
        )
    for name in NOT_BESIDE_STREAM:
        if getattr(recipe, name) != type(recipe).model_fields[name].default:
            raise ValueError(
                f"[{name}] does nothing beside [stream], whose samples are arrays; leave it out"
            )
    if recipe.layout.island > 1:
        raise ValueError(
            f"[stream] has samples for one model, and layout.island = {recipe.layout.island} trains several; leave "
            "layout.island out"
        )
    if recipe.resilience.combines or recipe.resilience.code:
        raise ValueError(
            "[stream] divides losses by the samples of all replicas together; leave resilience.aggregate and "
            "resilience.code out"
        )
    if not (stream.producers or stream.listen):
        raise ValueError(
            "[stream] has nobody who sends samples; set producers to command lines, or listen to an address"
        )
    if stream.others and not stream.listen:
        raise ValueError(
            f"stream.others = {stream.others} simulators have no address to join at; set stream.listen"
        )
    if stream.address and stream.address[1] > 65535:
        raise ValueError(
            f"stream.listen = {stream.listen!r} has no port below 65536; give HOST:PORT"
        )
    needs = recipe.train.batch if find("buffer", stream.buffer).implementation.empties else 1  # fmt: skip
    if stream.capacity < stream.watermark + needs:
        raise ValueError(
            f"stream.capacity = {stream.capacity} leaves no room above stream.watermark = {stream.watermark} for "
            f"{needs} samples of a draw; raise capacity, or lower watermark"
        )
    if not recipe.train.steps:
        raise ValueError(
            "train.steps = 0 waits for the end of the data, and nobody knows how long a stream is; set the most steps"
        )
    validation = recipe.validation
    if not stream.held_out and (validation.keep_best or validation.patience):
        name = "keep_best" if validation.keep_best else "patience"
        raise ValueError(
            f"validation.{name} waits for validations, and nothing is held out for one; set stream.held_out"
        )
