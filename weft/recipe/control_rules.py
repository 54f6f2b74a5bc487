"""Rules for the section ``[control]``, and for what else a recipe with it may set."""

from typing import Any

#: Sections that mean something beside ``[control]``, and of ``[train]`` and ``[layout]`` the settings that do.
BESIDE_CONTROL = (
    "name",
    "plugins",
    "layout",
    "train",
    "checkpoint",
    "observe",
    "control",
)
OF_TRAIN, OF_LAYOUT = ("seed", "dtype", "device", "threads", "timeout"), ("dp",)


def check_control(control: Any) -> None:
    """Raise :class:`ValueError` if settings of ``control`` do not go together.

    ``control``: the section, a :class:`weft.recipe.control_section.Control`.
    """
    off_policy = control.off_policy
    fields = type(control).model_fields
    # a recorded recipe has every field
    asked = {key for key in fields if getattr(control, key) != fields[key].default}
    only_stored = {
        "replay",
        "warmup",
        "ratio",
        "lockstep",
        "average",
        "explore",
        "every",
    }
    only_newest = {
        "horizon", "epochs", "trace", "clip", "entropy", "value", "processes", "cutoff", "policy", "decay",
    }  # fmt: skip
    for key in sorted(asked & (only_newest if off_policy else only_stored)):
        raise ValueError(
            f"{key} does nothing for method = {control.method!r}; leave it out"
        )
    if control.method != "dqn" and "explore" in asked:
        raise ValueError(
            f"explore does nothing for method = {control.method!r}; leave it out"
        )
    if control.reward == "own" and (control.terms or control.progress is not None):
        raise ValueError(
            "terms and progress are for reward = 'product' or 'sum', and it is 'own'; set reward"
        )
    if control.reward != "own" and not control.terms and control.progress is None:
        raise ValueError(
            f"reward = {control.reward!r} without terms or progress is the environment's own; add [[control.terms]]"
        )
    if off_policy and control.warmup < control.minibatch:
        raise ValueError(
            f"warmup = {control.warmup} transitions are too few for a minibatch of {control.minibatch}; raise warmup"
        )
    if off_policy and control.replay < control.warmup:
        raise ValueError(
            f"replay = {control.replay} keeps fewer transitions than warmup = {control.warmup}; raise replay"
        )
    if control.lockstep and control.ratio:
        raise ValueError("lockstep has one update for each transition; leave ratio out")
    if ":" in control.environment:
        module, _, name = control.environment.partition(":")
        if not module or not name:
            raise ValueError(
                "it should be an id of Gymnasium, or module:name of your own"
            )


def check_beside_control(recipe: Any) -> None:
    """Raise :class:`ValueError` for the first setting of ``recipe`` that has no effect in a run with ``[control]``."""
    control = recipe.control
    for name in sorted(recipe.model_fields_set):
        if (
            name not in BESIDE_CONTROL
            and getattr(recipe, name) != type(recipe).model_fields[name].default
        ):
            raise ValueError(
                f"[{name}] does nothing beside [control], which trains a policy of its own; leave it out"
            )
    for name, kept in (("train", OF_TRAIN), ("layout", OF_LAYOUT)):
        section = getattr(recipe, name)
        fields = type(section).model_fields
        for key in sorted(section.model_fields_set - set(kept)):
            if getattr(section, key) != fields[key].default:
                raise ValueError(
                    f"{name}.{key} does nothing beside [control]; use {' or '.join(f'{name}.{k}' for k in kept)}, or "
                    "leave it out"
                )
    if recipe.train.dtype == "bfloat16":
        raise ValueError(
            "train.dtype = 'bfloat16' is too coarse for control; use 'float32' or 'float64'"
        )
    if recipe.checkpoint.export:
        raise ValueError(
            "checkpoint.export is for language models; leave it out, checkpoints hold the policy"
        )
    ranks = recipe.layout.dp
    if control.off_policy and ranks > 1:
        raise ValueError(
            f"control.method = {control.method!r} has one learner, and layout.dp = {ranks}; use "
            "control.environments for more workers, or method = 'ppo'"
        )
    if control.environments % ranks:
        raise ValueError(
            f"control.environments = {control.environments} cannot be divided by layout.dp = {ranks}; change one of "
            "them"
        )
