"""Plugins: a user's own callbacks, losses, models, data sets and trackers, called by name in a recipe.

``plugins`` of a recipe names modules. Every process that reads the recipe imports them, from where Python finds them or
from the folder that the command runs in, and there they register what they offer::

    from weft.plugins import register

    @register("loss", "focal")
    def focal(logits, labels, gamma=2.0): ...

What is registered is called with what its kind gives (:data:`KINDS`), and with the recipe's settings as keywords.
docs/reference/extension-kinds.md says what each kind may assume.
"""

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from weft.errors import UsageError, WeftError, nearest
from weft.registry import KINDS, Registered, find, names, register, setting_values

__all__ = ["Callback", "register"]

#: What a callback may have, each with what it is called with. ``after_step`` runs every ``every`` steps, else never.
HOOKS: dict[str, tuple[str, ...]] = {
    "start": ("run",),
    "after_step": ("run", "result"),
    "after_evaluation": ("run", "values"),
    "end": ("run",),
}


class Callback:
    """Base for callbacks of a plugin: each method does nothing, and a subclass overrides those that it needs.

    ``every``: steps between two calls of :meth:`after_step`. The argument ``run`` of all methods is the run in
    progress, a :class:`weft.train.callbacks.Running`.
    """

    every = 1

    def start(self, run: Any) -> None:
        """React to the start of a run. Called once, before the first step."""

    def after_step(self, run: Any, result: Any) -> None:
        """React to a training step, after its update. ``run``: the run in progress. ``result``: loss, gradient norm and
        other values of the step.
        """

    def after_evaluation(self, run: Any, values: Mapping[str, float]) -> None:
        """React to an evaluation that has just ended. ``run``: the run in progress. ``values``: the measured values by
        name.
        """

    def end(self, run: Any) -> None:
        """React to the end of a run. Called once, after the last checkpoint is saved."""


class PluginError(Exception):
    """An error that a plugin's code raised while it ran. The original error is its ``__cause__``."""


def call(technique: Registered, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the implementation of a plugin's technique with ``settings`` bound as keyword arguments.

    Errors raised in the returned function name the plugin.
    """
    return blaming(technique, partial(technique.implementation, **settings))


def blaming(technique: Registered, work: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function ``work``, changed so that its errors name the plugin that registered ``technique``."""

    def called(*given: Any) -> Any:
        with blame_plugin(str(technique)):
            return work(*given)

    return called


def model_technique(shape: Any) -> Registered:
    """Return the registered technique that builds the model of ``shape`` (section ``[model]``).

    It is of kind "model", or of kind "surrogate" for a model of arrays.
    """
    return find("surrogate" if shape.inputs else "model", shape.kind)


def check_model_plugin(shape: Any) -> None:
    """Check that the model of ``shape`` (section ``[model]``) can be built. Raises :class:`ValueError` if it cannot."""
    if own := shape.architecture:
        own.check(shape)
        return
    kind, other = ("surrogate", "model") if shape.inputs else ("model", "surrogate")
    if shape.kind in names(other) and shape.kind not in names(kind):
        remedy = (
            "it reads tokens; leave model.inputs and model.outputs out"
            if shape.inputs
            else "it reads arrays; set model.inputs and model.outputs"
        )
        raise ValueError(f"model.kind = {shape.kind!r}: {remedy}")
    check_plugin(kind, shape.kind, shape.settings)


def build_plugin_model(shape: Any, vocab: int) -> Any:
    """Build the ``torch.nn.Module`` of the model ``shape``, which names a plugin's model or a surrogate.

    ``vocab``: number of tokens in the vocabulary, for a model of tokens. ``shape.settings`` are passed as keyword
    arguments. Raises :class:`WeftError` if the module cannot be trained.
    """
    who = model_technique(shape)
    given = (shape.inputs, shape.outputs) if shape.inputs else (vocab,)
    model = call(who, shape.settings)(*given)
    if not hasattr(model, "named_parameters"):
        raise WeftError(
            f"{who} returned {type(model).__name__}, which is no torch.nn.Module"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise WeftError(f"{who} has no parameter that learns")
    for parameter, values in model.named_parameters():
        if not values.dim():
            raise WeftError(
                f"{who}: parameter {parameter} has no dimension; make it a vector of one element"
            )
    return model


def check_plugin(kind: str, name: str, settings: Mapping[str, Any] = {}) -> None:
    """Check that a technique of ``kind`` has this ``name`` and, if it is a plugin's, can be called with ``settings``.

    Raises :class:`ValueError` otherwise, as validators of recipes do.
    """
    what = KINDS[kind]
    choices = list(filter(None, setting_values(what.setting)))
    if name not in choices:
        hint = nearest(name, choices) if choices else "no plugin has registered any"
        raise ValueError(f"{what.setting} = {name!r} is not possible; {hint}")
    if name in what.plain or name not in names(kind):
        return
    technique = find(kind, name)
    _check_call(str(technique), technique.implementation, what.called, settings)
    if kind == "callback" and inspect.isclass(technique.implementation):
        _check_hooks(technique)


def _check_hooks(technique: Registered) -> None:
    """Refuse a class of callbacks that has no method of :data:`HOOKS`, or one with the wrong parameters."""
    methods = {
        hook: method
        for hook in HOOKS
        if (method := getattr(technique.implementation, hook, None))
        not in (None, getattr(Callback, hook))
    }
    if not methods:
        raise ValueError(
            f"{technique} does nothing; give it one of the methods {', '.join(HOOKS)}"
        )
    for hook, method in methods.items():
        _check_call(f"{hook} of {technique}", method, ("self", *HOOKS[hook]))


def _check_call(
    who: str,
    target: Callable[..., Any],
    given: Sequence[str],
    settings: Mapping[str, Any] = {},
) -> None:
    try:
        inspect.signature(target).bind(*given, **settings)
    except TypeError as error:
        shown = ", ".join([*given, *(f"{key}=" for key in settings)])
        raise ValueError(f"{who} cannot be called with ({shown}): {error}") from None


#: The modules that recipes of this process have named.
loaded = set[str]()


def load_plugins(modules: Sequence[str]) -> None:
    """Import ``modules``, which register their techniques.

    Modules are searched on Python's path, and in the folder in which the command runs. Raises :class:`ValueError`, in
    one line that names the module, if an import fails.
    """
    here = str(Path.cwd())
    if modules and here not in sys.path:
        sys.path.append(here)
    for module in modules:
        loaded.add(module)
        try:
            import_module(module)
        except UsageError as error:
            raise ValueError(f"plugins: {module!r}: {error}") from None
        except (Exception, SystemExit) as error:
            if os.environ.get("WEFT_DEBUG", "0") not in ("", "0"):
                traceback.print_exception(error)
            raise ValueError(f"plugins: {_why_not(module, error)}") from error


def load_plugins_of(recipe: Mapping[str, Any]) -> None:
    """Import the modules that the key ``plugins`` of ``recipe`` lists, a dictionary that is not validated yet.

    Called before validation, as sections may name techniques of these modules. If ``plugins`` is no list of names,
    nothing is imported, and validation will refuse the recipe.
    """
    modules = recipe.get("plugins", ())
    if isinstance(modules, list | tuple) and all(isinstance(m, str) for m in modules):
        load_plugins(modules)


def _why_not(module: str, error: BaseException) -> str:
    """Return why ``module`` cannot be imported."""
    if (
        isinstance(error, ModuleNotFoundError)
        and error.name
        and f"{module}.".startswith(f"{error.name}.")
    ):
        return f"there is no module {module!r}; install its package, or run in the folder that has it"
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "importlib" not in f.filename
    ]
    own = [f for f in frames if f.filename != __file__]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    line = (str(error).splitlines() or [""])[0]
    return f"{module!r} cannot be imported: {type(error).__name__}: {line}{where}"


@contextmanager
def blame_plugin(who: str) -> Iterator[None]:
    """Turn errors raised in this context into a :class:`PluginError` that names the plugin ``who``.

    Errors of Weft's own and lack of GPU memory are raised as they are.
    """
    try:
        yield
    except (WeftError, PluginError):
        raise
    except (
        Exception,
        SystemExit,
    ) as error:  # a rank that leaves without a word would leave the others waiting
        if type(error).__name__ == "OutOfMemoryError":  # which has a remedy of its own
            raise
        line = (str(error).splitlines() or [""])[0]
        raise PluginError(f"{who} failed: {type(error).__name__}: {line}") from error
