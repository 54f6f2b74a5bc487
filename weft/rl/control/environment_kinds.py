"""Environments as recipes name them: what they observe, how they are acted on, and Weft's own tiny environment."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from weft.errors import UsageError, WeftError, nearest


class ControlEnvironment(Protocol):
    """Interface of an environment for control tasks: the methods of :class:`gymnasium.Env` that Weft calls."""

    observation_space: Any
    action_space: Any

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; return its first observation, and a dict of further information.

        ``seed``: seed of the episode; None: go on with the present random numbers. ``options``: options of the
        environment.
        """

    def step(self, action: Any) -> Any:
        """Take ``action``; return ``(observation, reward, terminated, truncated, info)``, where ``info`` is a dict."""


@dataclass(frozen=True)
class ActionForm:
    """Form of an environment's observations and actions.

    Attributes:
        ``observed``: number of components of an observation.
        ``choices``: number of discrete choices, one of which is an action; 0: an action is a vector of numbers.
        ``low``, ``high``: bounds of each number of an action; infinite where there is none.
        ``first``: the environment's number for the first choice.
        ``labels``: number of labels, if an observation is one of several labels and becomes a one-hot vector; 0:
            observations are numbers.
    """

    observed: int
    choices: int = 0
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    first: int = 0
    labels: int = 0

    @property
    def numbers(self) -> int:
        """How many numbers an action consists of; 0 if actions are choices."""
        return len(self.low)

    @property
    def bounded(self) -> bool:
        """Whether every number of an action has a finite lower and upper bound."""
        return bool(np.isfinite([*self.low, *self.high]).all())


def action_form(environment: ControlEnvironment) -> ActionForm:
    """Return the form of observations and actions of ``environment``.

    Raises :class:`WeftError` if observations are no vectors or labels, or actions neither choices nor numbers.
    """
    if hasattr(environment, "num_envs"):
        raise UsageError(
            "control.environment makes a vector of environments; let it make a single one, of which Weft runs "
            "control.environments side by side"
        )
    seen, acted = environment.observation_space, environment.action_space
    labels = int(getattr(seen, "n", 0)) if not hasattr(seen, "low") else 0
    if not labels and (not hasattr(seen, "low") or not isinstance(seen.shape, tuple)):
        raise WeftError(
            f"its observations are {type(seen).__name__}, and control learns from vectors (Box) and labels (Discrete); "
            "wrap the environment, for example in gymnasium.wrappers.FlattenObservation"
        )
    observed = labels or int(np.prod(seen.shape))
    if hasattr(acted, "low"):
        low, high = (
            np.broadcast_to(np.asarray(bound, np.float64), acted.shape).reshape(-1)
            for bound in (acted.low, acted.high)
        )
        return ActionForm(
            observed, low=tuple(low.tolist()), high=tuple(high.tolist()), labels=labels
        )
    if isinstance(getattr(acted, "n", None), int | np.integer):
        return ActionForm(
            observed, int(acted.n), first=int(getattr(acted, "start", 0)), labels=labels
        )
    raise WeftError(
        f"its actions are {type(acted).__name__}, and control chooses one of several (Discrete) or numbers (Box); wrap "
        "the environment"
    )


def flat_observation(form: ActionForm, observation: Any) -> np.ndarray:
    """Return an environment's observation as a vector of numbers, float64 ``[form.observed]``."""
    if form.labels:
        vector = np.zeros(form.observed)
        vector[int(observation)] = 1.0
        return vector
    return np.asarray(observation, np.float64).reshape(-1)


def native_action(form: ActionForm, action: np.ndarray, space: Any) -> Any:
    """Return ``action`` in the form that the environment takes: a choice, or numbers within its bounds.

    ``action``: an integer array without dimensions, or numbers ``[form.numbers]``. ``space``: the environment's space
    of actions.
    """
    if form.choices:
        return form.first + int(action)
    within = np.clip(action, form.low, form.high)
    return within.reshape(space.shape).astype(getattr(space, "dtype", np.float64))


def make_environment(
    word: str, settings: Mapping[str, Any], time_limit: int
) -> ControlEnvironment:
    """Make the environment that a recipe names.

    ``word``: an id of Gymnasium, or ``module:name``; ``settings``: keyword arguments; ``time_limit``: steps after which
    an episode is truncated, 0 for the environment's own limit. Raises :class:`UsageError` if it cannot be made.
    """
    module, colon, name = word.partition(":")
    if colon:
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            maker = getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise UsageError(
                f"control.environment = {word!r} cannot be imported ({error}); start weft where {module} lies, or set "
                "PYTHONPATH"
            ) from None
        except AttributeError:
            raise UsageError(
                f"control.environment = {word!r}: {module} has no {name}"
            ) from None
    else:
        try:
            import gymnasium
        except ImportError:
            raise UsageError(
                f"control.environment = {word!r} is an environment of Gymnasium, which is not installed; pip install "
                "'weft[control]'"
            ) from None

        def maker(**arguments: Any) -> ControlEnvironment:
            return gymnasium.make(word, **arguments)

    try:
        if time_limit and not colon:
            return maker(**settings, max_episode_steps=time_limit)
        environment = maker(**settings)
    except Exception as error:
        raise UsageError(_why_unmade(word, error)) from None
    return LimitedEpisodes(environment, time_limit) if time_limit else environment


def _why_unmade(word: str, error: Exception) -> str:
    about = f"control.environment = {word!r} cannot be made"
    if type(error).__name__ in ("NameNotFound", "VersionNotFound"):
        import gymnasium

        return f"no environment {word!r}; {nearest(word, list(gymnasium.registry))}"
    return f"{about}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


class LimitedEpisodes:
    """Wrapper of the environment ``inner`` that truncates episodes after ``limit`` steps."""

    def __init__(self, inner: ControlEnvironment, limit: int) -> None:
        self._inner, self._limit, self._steps = inner, limit, 0
        self.observation_space = inner.observation_space
        self.action_space = inner.action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode with the full number of steps; return its first observation and further information, as
        :meth:`ControlEnvironment.reset` does.
        """
        self._steps = 0
        return self._inner.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """Take an action.

        At the limit of steps the result is marked as truncated. See :meth:`ControlEnvironment.step`.
        """
        seen, reward, terminated, truncated, facts = self._inner.step(action)
        self._steps += 1
        return seen, reward, terminated, truncated or self._steps >= self._limit, facts


@dataclass(frozen=True)
class ChoiceRange:
    """Action space of ``n`` choices. It takes the place of :class:`gymnasium.spaces.Discrete` in environments that do
    without Gymnasium.
    """

    n: int


@dataclass(frozen=True)
class NumberRange:
    """Space of arrays whose numbers lie between the bounds ``low`` and ``high``. It takes the place of
    :class:`gymnasium.spaces.Box` in environments that do without Gymnasium.
    """

    low: float
    high: float
    shape: tuple[int, ...]


class LineWalk:
    """Small environment without Gymnasium for tests: walk on a line from a random place to the goal at 1.

    An observation is ``(place, speed)``. An action pushes left, not at all or right; with ``continuous`` it is the
    force, from -1 to 1. The reward of a step is the distance moved towards the goal, and 1 more at the goal, where the
    episode terminates. After ``limit`` steps it is truncated.
    """

    def __init__(self, continuous: bool = False, limit: int = 40) -> None:
        self.observation_space = NumberRange(-np.inf, np.inf, (2,))
        self.action_space: Any = (
            NumberRange(-1.0, 1.0, (1,)) if continuous else ChoiceRange(3)
        )
        self._continuous, self._limit = continuous, limit
        self._generator = np.random.default_rng(0)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin an episode at a random place left of the middle; return the first observation and an empty dict.
        ``seed``: seed of the place; None: go on with the present random numbers. ``options`` is not used.
        """
        if seed is not None:
            self._generator = np.random.default_rng(seed)
        self._place, self._speed = float(self._generator.uniform(-0.5, 0.0)), 0.0
        self._steps = 0
        return np.array([self._place, self._speed]), {}

    def step(self, action: Any) -> Any:
        """Push by ``action``; return observation, reward, terminated, truncated and an empty dict.

        ``action``: 0 (left), 1 (not at all) or 2 (right); with ``continuous``, the force.
        """
        force = float(np.asarray(action).reshape(-1)[0])
        if not self._continuous:
            force -= 1.0
        before = self._place
        self._speed = 0.8 * self._speed + 0.05 * force
        self._place = max(-1.0, self._place + self._speed)
        self._steps += 1
        there = self._place >= 1.0
        reward = self._place - before + there
        seen = np.array([self._place, self._speed])
        return seen, reward, there, self._steps >= self._limit and not there, {}


def form_from_words(words: Mapping[str, Any]) -> ActionForm:
    """Build a form from the plain values that :func:`form_in_words` returned."""
    bounds = {key: tuple(words[key]) for key in ("low", "high")}
    return ActionForm(**{**words, **bounds})


def form_in_words(form: ActionForm) -> dict[str, Any]:
    """Return ``form`` as plain values by name, so that it can be sent to another process."""
    return asdict(form)
