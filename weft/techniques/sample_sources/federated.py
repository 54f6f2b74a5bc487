"""Samples of federated training: a client's own, a server's changes of the model, or a virtual clock's clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.federated.federation_settings import federation_of
from weft.registry import register

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.train.setup import Job


@register("samples", "federated")
def federated_samples(recipe: Recipe) -> Job:
    """Check ``recipe``, which has a section ``[federated]``, and return the job that trains on its samples."""
    if federation_of(recipe).join:
        from weft.federated.client_job import prepare_client

        return prepare_client(recipe)
    from weft.federated.server_job import prepare_server

    return prepare_server(recipe)
