"""Samples that simulators send while the model learns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.train.setup import Job


@register("samples", "stream")
def simulated_samples(recipe: Recipe) -> Job:
    """Check ``recipe``, which has a section ``[stream]``, and return the job that trains on its simulated samples."""
    from weft.streams.stream_job import prepare_stream

    return prepare_stream(recipe)
