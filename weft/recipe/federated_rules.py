"""Rules for what a recipe with ``[federated]`` may set when its clients are simulated."""

from __future__ import annotations

from typing import Any

from weft.registry import find

#: Sections that mean something beside simulated clients, and of ``[train]`` and ``[optimizer]`` the settings that do.
BESIDE_SIMULATION = (
    "name", "plugins", "model", "layout", "train", "optimizer", "checkpoint", "observe", "federated",
)  # fmt: skip
OF_TRAIN = ("batch", "seed", "dtype", "threads", "timeout", "device")
OF_OPTIMIZER = ("kind", "lr")
#: Settings of ``[federated]`` about clients that are simulated.
OF_SIMULATION = (
    "fresh", "fresh_after", "samples", "held_out", "partition", "alpha", "classes", "speeds", "jitter", "drops", "away",
)  # fmt: skip


def check_beside_federated(recipe: Any) -> None:
    """Raise :class:`ValueError` for the first setting of ``recipe`` that cannot be combined with ``[federated]``.

    With ``federated.listen`` or ``federated.join`` clients are real processes that train as any run does, and only
    conflicts with federated training are refused.
    """
    federated = recipe.federated
    if federated.aggregator == "process" and federated.fan_in < 3:
        raise ValueError(
            f"federated.aggregator = 'process' keeps updates and sums of three levels within fan_in + 1, and "
            f"federated.fan_in = {federated.fan_in}; set it to 3 or more"
        )
    plain = find("federation-policy", federated.policy).implementation(federated).client_step.is_plain  # fmt: skip
    if federated.fresh == "inversion" and not plain:
        raise ValueError(
            f"federated.fresh = 'inversion' looks for plain local steps, and clients of policy {federated.policy!r} "
            "correct their gradients; leave one of them out"
        )
    if federated.aggregate != "mean" and federated.fan_in:
        raise ValueError(
            f"federated.aggregate = {federated.aggregate!r} looks at all updates together, and federated.fan_in adds "
            "them up as they come; leave one of them out"
        )
    if federated.aggregate != "mean" and getattr(federated, "secure", False):
        raise ValueError(
            f"federated.secure hides the updates that federated.aggregate = {federated.aggregate!r} would compare; "
            "leave one of them out"
        )
    if federated.listen or getattr(federated, "join", ""):
        _check_real(federated)
        return
    model = recipe.model
    if not model.inputs:
        raise ValueError(
            "[federated] without listen simulates its clients, which classify arrays; set model.kind, model.inputs and "
            "model.outputs, or federated.listen for clients that train this model"
        )
    if len(model.inputs) != 1 or len(model.outputs) != 1:
        raise ValueError(
            "simulated clients classify one array; give model.inputs one entry, and model.outputs one with the number "
            "of classes"
        )
    if len(shape := next(iter(model.outputs.values()))) != 1:
        raise ValueError(
            f"model.outputs has the shape {list(shape)}, and holds a number for each class: [classes]"
        )
    for name in sorted(recipe.model_fields_set):
        default = type(recipe).model_fields[name].default
        if name not in BESIDE_SIMULATION and getattr(recipe, name) != default:
            raise ValueError(
                f"[{name}] does nothing beside [federated] with simulated clients; leave it out"
            )
    for name, kept in (("train", OF_TRAIN), ("optimizer", OF_OPTIMIZER)):
        section = getattr(recipe, name)
        fields = type(section).model_fields
        for key in sorted(section.model_fields_set - {*kept}):
            if getattr(section, key) != fields[key].default:
                raise ValueError(
                    f"{name}.{key} does nothing for simulated clients; use {' or '.join(f'{name}.{k}' for k in kept)}, "
                    "or leave it out"
                )
    if recipe.optimizer.kind != "sgd":
        raise ValueError(
            f"optimizer.kind = {recipe.optimizer.kind!r}, and simulated clients take plain steps; set optimizer.kind = "
            "'sgd'"
        )
    if recipe.layout.world != 1:
        raise ValueError(
            f"layout has {recipe.layout.world} ranks, and simulated clients share one; leave the layout out"
        )
    if federated.per_round > federated.clients:
        raise ValueError(
            f"federated.per_round = {federated.per_round} is more than federated.clients = {federated.clients}; "
            "lower it"
        )


def _check_real(federated: Any) -> None:
    """Refuse what is about simulated clients in the recipe of a real server or client, and a port that is none."""
    if int(federated.listen.rpartition(":")[2] or 0) > 65_535:
        raise ValueError(
            f"federated.listen = {federated.listen!r}: ports end at 65535; give another, or 0 for any free one"
        )
    fields = type(federated).model_fields
    for key in OF_SIMULATION:
        if (
            key in federated.model_fields_set
            and getattr(federated, key) != fields[key].default
        ):
            raise ValueError(
                f"federated.{key} is about simulated clients, and real ones join this run; leave it out"
            )
