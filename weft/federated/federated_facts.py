"""What server and client must agree on before any work: the model, its base, the tokenizer; and the recipe on offer."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from weft.cache import digest
from weft.errors import UsageError, WeftError
from weft.federated.federation_settings import federation_of
from weft.shapes.parameters import learns, parameters

if TYPE_CHECKING:
    from weft.net.wire import Head
    from weft.recipe import ModelShape, Recipe
    from weft.train.setup import Job

#: Sections of the server's recipe that a client begins with. The others are about the server's own machine and data.
OFFERED = ("name", "model", "adapter", "train", "loss", "optimizer", "federated")
#: Settings of ``[data]`` that are about a place on the server's machine.
OF_SERVER = ("path", "sources", "cache", "validation", "tokenizer", "epochs", "mix")
#: Settings of ``[federated]`` that belong to the server alone.
SERVER_ALONE = ("listen", "join", "name")


def learning_shapes(recipe: Recipe, shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the model that learns, by name. Server and clients send only these
    parameters to each other.
    """
    return {
        p.name: tuple(p.shape)
        for p in parameters(shape)
        if learns(p.name, shape, recipe.train.freeze)
    }


def travel_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype in which server and clients of a run hold parameters and send them."""
    return torch.float64 if recipe.train.dtype == "float64" else torch.float32


def agreed_facts(job: Job) -> dict[str, str]:
    """Return digests of the settings on which server and clients must agree, by the names that error lines use."""
    recipe, shape = job.recipe, job.shape
    shapes = learning_shapes(recipe, shape)
    facts = {
        "parameters": digest(
            sorted((name, list(size)) for name, size in shapes.items())
        ),
        "model": digest(_model_facts(shape)),
        "tokenizer": job.corpus.tokenizer.fingerprint,
        "number format": str(travel_dtype(recipe)),
    }
    if shape.adapter is not None:
        from weft.checkpoint.resume_check import run_base

        base = run_base(recipe, shape) or {}
        facts["base model"] = digest(base.get("fingerprint"), base.get("seed"))
    return facts


def _model_facts(shape: ModelShape) -> dict[str, Any]:
    """Return the fields of ``shape`` that say what the model computes."""
    values = shape.model_dump(mode="json")
    values.pop("origin", None)
    values.pop("from", None)
    if isinstance(values.get("adapter"), dict):
        values["adapter"].pop("dropout", None)
    return values


def disagreement(own: Mapping[str, str], hello: Head) -> str:
    """Return why a client cannot take part in a run; an empty text if it can.

    ``own``: the server's facts, which are digests of settings that must be equal (:func:`agreed_facts`). ``hello``: the
    client's first message, with the client's facts.
    """
    theirs = hello.get("facts")
    if not isinstance(theirs, dict):
        return (
            "it does not say which model it trains; is it of another version of Weft?"
        )
    for what, value in own.items():
        if theirs.get(what) != value:
            remedy = {
                "parameters": "other parameters learn there: use the server's [model], [adapter] and train.freeze",
                "model": "its model computes something else: use the server's [model] and [adapter]",
                "tokenizer": "its tokens mean something else: leave data.tokenizer to the server's recipe",
                "number format": "use the server's train.dtype",
                "base model": "its adapter has another base: give the very weights that the server has (--from)",
            }[what]
            return f"its {what} differ{'s' * (what != 'parameters')} from the server's; {remedy}"
    return ""


def offered_recipe(job: Job) -> tuple[Head, bytes]:
    """Return the answer to a client that asks for the run's recipe: a head (JSON values), and the tokenizer's files as
    bytes.
    """
    recipe = job.recipe
    tree = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)
    offered = {name: tree[name] for name in OFFERED if name in tree}
    offered["data"] = {
        key: value
        for key, value in recipe.data.model_dump(mode="json", by_alias=True, exclude_unset=True).items()
        if key not in OF_SERVER
    } | {"kind": recipe.data.sources[0].kind}  # fmt: skip
    offered["federated"] = {
        key: value
        for key, value in offered["federated"].items()
        if key not in SERVER_ALONE
    }
    files = {
        name: base64.b64encode(text).decode()
        for name, text in job.corpus.tokenizer.files().items()
    }
    head = {
        "kind": "recipe", "recipe": offered, "facts": agreed_facts(job), "plugins": list(recipe.plugins),
        "shape": job.shape.model_dump(mode="json", by_alias=True),
    }  # fmt: skip
    return head, json.dumps(files).encode()


def offered_files(payload: memoryview) -> dict[str, bytes]:
    """Return the tokenizer's files in the ``payload`` of an offer, by name. Raises :class:`WeftError` if damaged."""
    try:
        files = json.loads(bytes(payload))
        decoded = {str(name): base64.b64decode(text) for name, text in files.items()}
    except (ValueError, TypeError, AttributeError):
        raise WeftError("the tokenizer that the server sent is damaged") from None
    if any("/" in name or "\\" in name or name.startswith(".") for name in decoded):
        raise WeftError("the server sent files with names that are none of a tokenizer")
    return decoded


def check_rounds(recipe: Recipe) -> None:
    """Check that the updates of a recipe with ``federated.secure`` can be summed without being shown to the server.

    Raises :class:`UsageError` for a policy that does not work in rounds, for a sum over one client, and for a policy
    whose clients also send control variates.
    """
    from weft.federated.round_policy import RoundPolicy
    from weft.registry import find

    settings = federation_of(recipe)
    policy = find("federation-policy", settings.policy).implementation
    if settings.secure and not issubclass(policy, RoundPolicy):
        raise UsageError(
            f"federated.secure sums the updates of a round, and federated.policy = {settings.policy!r} takes each as "
            "it comes; use 'fedavg', or leave secure out"
        )
    if settings.secure and 1 in (settings.per_round, settings.clients):
        raise UsageError(
            "federated.secure: a sum over one client hides nothing; let federated.per_round and federated.clients be "
            "2 or more"
        )
    if settings.secure and policy(settings).client_step.control:
        raise UsageError(
            f"federated.secure masks updates, and clients of federated.policy = {settings.policy!r} also send their "
            "control variates, which would show them; use 'fedavg' or 'fedavg-m', or leave secure out"
        )
