"""The one way to extend Weft: whatever a recipe can name declares itself here, Weft's own techniques and plugins alike.

A declaration is a decorator on what it declares::

    @register("optimizer", "muon", paper="Jordan et al. 2024", recipe="optimizers.toml")
    class Muon(UpdateRule): ...

Weft's own techniques stand in ``weft/techniques/``, one file for each name: ``muon`` of kind ``optimizer`` is
``weft/techniques/optimizers/muon.py``. A file is imported when a recipe names it and not before, so that a technique
whose file is deleted is gone, and nothing else notices. A user's techniques stand in the modules that ``plugins`` of a
recipe names. Recipe reader, table of conflicts, fuzzer, planner, resume check and catalogue ask this registry.

A declaration must not import PyTorch when its file is imported, as recipes are read by commands that do without; what
computes imports it inside its functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from pydantic_core import PydanticKnownError

from weft.errors import UsageError, nearest

if TYPE_CHECKING:
    from weft.refusal import Rule
    from weft.section import Section

F = TypeVar("F", bound=Callable[..., Any])


class About(TypedDict, total=False):
    """Optional arguments of :func:`register`, which describe a technique.

    Attributes:
        ``settings``: section class with the fields that only this technique has.
        ``rules``: rules that refuse combinations with other settings.
        ``draws``: values of its settings that the fuzzer may draw, by name of the setting.
        ``title``: the technique's name in the catalogue.
        ``paper``: its source.
        ``recipe``: recipe that shows it, with command-line options if necessary.
        ``proof``: the tests of it.
        ``figure``: the result that was measured.
    """

    settings: type[Section] | None
    rules: Sequence[Rule]
    draws: Mapping[str, Sequence[Any]]
    title: str
    paper: str
    recipe: str
    proof: str
    figure: str


@dataclass(frozen=True)
class TechniqueKind:
    """A kind of technique, such as optimizers or schedules.

    Attributes:
        ``noun``: the word for a technique of this kind in error lines.
        ``setting``: the recipe's setting, or the command's option, that names the technique.
        ``called``: names of the positional arguments with which a technique's implementation is called.
        ``folder``: folder in ``weft/techniques/`` with Weft's own techniques; empty if there are none.
        ``plain``: values of the setting that name no technique, because Weft's core handles them.
    """

    noun: str
    setting: str
    called: tuple[str, ...] = ()
    folder: str = ""
    plain: tuple[str, ...] = ()

    def choices(self, names: Sequence[str]) -> list[str]:
        """Return all values that the recipe's setting for this kind can have.

        ``names``: the names of this kind's techniques.
        """
        return [*self.plain, *(name for name in names if name not in self.plain)]


#: Every kind of technique that a recipe can name, or an option of a command.
KINDS: dict[str, TechniqueKind] = {
    "callback": TechniqueKind("callback", "callbacks"),
    "loss": TechniqueKind("loss", "loss.kind", ("logits", "labels"), plain=("cross-entropy",)),
    "model": TechniqueKind("model", "model.kind", ("vocab",), plain=("",)),
    "architecture": TechniqueKind("architecture", "model.kind", (), "architectures"),
    "sampler": TechniqueKind("sampler", "--sampler", (), "samplers"),
    "surrogate": TechniqueKind("surrogate model", "model.kind", ("inputs", "outputs"), "surrogates"),
    "dataset": TechniqueKind("dataset", "data.kind", ("path",), "datasets", (
        "stdlib", "text", "jsonl", "parquet", "huggingface", "tokens", "chat", "preference", "feedback",
    )),
    "tracker": TechniqueKind("tracker", "observe.trackers", ("run",), "trackers"),
    "optimizer": TechniqueKind("update rule", "optimizer.kind", ("settings", "ranks"), "optimizers"),
    "moments": TechniqueKind("storage of moments", "optimizer.state", ("settings", "ranks"), "moments", ("float32",)),
    "schedule": TechniqueKind("pipeline schedule", "layout.schedule", (), "schedules"),
    "policy": TechniqueKind("scheduling policy", "--policy", (), "policies", ("exact-fill",)),
    "dispatch-policy": TechniqueKind("dispatch policy", "--dispatch", (), "dispatch_policies", ("load",)),
    "quota": TechniqueKind("quota controller", "--quota", (), "quotas"),
    "format": TechniqueKind("source format", "--from", (), "formats", ("weft",)),
    "pruner": TechniqueKind("way of pruning", "--by", (), "pruners"),
    "drafter": TechniqueKind("drafter", "--draft", (), "drafters"),
    "context": TechniqueKind("attention scheme", "layout.context", (), "context", ("ulysses",)),
    "dispatch": TechniqueKind("dispatcher", "layout.dispatch", (), "dispatch"),
    "sum": TechniqueKind("all-reduce", "layout.sum", (), "sums", ("", "auto", "gloo")),
    "overlap": TechniqueKind("kind of overlap", "layout.overlap", (), "overlaps", ("", "passes", "pairs")),
    "search": TechniqueKind("policy that can be searched", "weft search", (), "searches"),
    "cache-policy": TechniqueKind("cache policy", "--cache-policy", (), "cache_policies", ("none",)),
    "sampling-table": TechniqueKind("sampling table", "--table", (), "sampling_tables", ("exact",)),
    "sync": TechniqueKind("sync method", "sync.update", ("settings",), "sync"),
    "compressor": TechniqueKind("compressor", "sync.compress", (), "compressors", ("none",)),
    "aggregator": TechniqueKind("rule of aggregation", "resilience.aggregate", ("settings",), "aggregators", ("mean",)),
    "code": TechniqueKind("gradient code", "resilience.code", ("settings", "ranks"), "codes", ("",)),
    "task": TechniqueKind("task", "tasks.reward", ("settings", "seed"), "tasks", ("",)),
    "operator": TechniqueKind("operator", "steps.operator", ("step",), "operators"),
    "remote": TechniqueKind("remote place", "data.path", ("address",), "remote_sources"),
    "mixture": TechniqueKind("mixture", "data.mix", ("about",), "mixtures", ("static",)),
    "samples": TechniqueKind("source of samples", "rl", ("recipe",), "sample_sources"),
    "buffer": TechniqueKind("buffer of samples", "stream.buffer", ("capacity", "watermark", "seed"), "buffers"),
    "phases": TechniqueKind("technique of a step", "phases", (), "phases"),
    "pair-loss": TechniqueKind("loss of pairs", "loss.kind", ("settings",), "pair_losses", ("cross-entropy",)),
    "policy-loss": TechniqueKind("method", "rl.method", (), "policy_losses"),
    "federation-policy": TechniqueKind("federation policy", "federated.policy", ("settings",), "federation_policies"),
    "saddle-problem": TechniqueKind("saddle problem", "saddle.problem", (
        "settings", "seed", "dtype", "device",
    ), "saddle_problems"),
    "saddle-method": TechniqueKind("saddle method", "saddle.method", (
        "problem", "exchange", "settings",
    ), "saddle_methods"),
}  # fmt: skip


@dataclass(frozen=True)
class Registered:
    """A declared technique: its implementation, and its description for recipes, fuzzer and catalogue.

    Attributes:
        ``kind``: kind of the technique, a key of :data:`KINDS` such as "optimizer".
        ``name``: the value by which a recipe or a command names it.
        ``module``: the module that declares it.
        ``implementation``: the decorated function or class.
        ``settings``: section class with the fields that only this technique has. A recipe sets them in the section that
            names the technique.
        ``rules``: rules that refuse combinations with other settings, checked for recipes that name it.
        ``draws``: values of its settings that the fuzzer may draw, by name of the setting.
        ``title``: the technique's name in the catalogue.
        ``paper``: its source in the catalogue.
        ``recipe``: recipe that shows it, with command-line options if necessary, such as "v-half.toml --layout
            pp=4,schedule=v-min".
        ``proof``: the tests of it in the catalogue, separated by ", ".
        ``figure``: the result that was measured or is asserted, with the script of ``bench/`` that wrote it in
            backquotes.
    """

    kind: str
    name: str
    module: str
    implementation: Any
    settings: type[Section] | None = None
    rules: Sequence[Rule] = ()
    draws: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    title: str = ""
    paper: str = ""
    recipe: str = ""
    proof: str = ""
    figure: str = ""

    def __str__(self) -> str:
        owner = "" if self.module.startswith("weft.") else f" of plugin {self.module}"
        return f"{KINDS[self.kind].noun} {self.name!r}{owner}"


#: All that is registered so far, by kind and name.
_REGISTERED: dict[tuple[str, str], Registered] = {}


def register(kind: str, name: str, **about: Unpack[About]) -> Callable[[F], F]:
    """Return a decorator that declares a function or class as the technique ``name`` of a kind (:data:`KINDS`).

    ``about`` holds the other fields of :class:`Registered`; a plugin may leave out all of them. Raises
    :class:`UsageError` for an unknown kind, and for a name that another module has registered.
    """
    if kind not in KINDS:
        raise UsageError(
            f"register({kind!r}, {name!r}): there is no such kind; {nearest(kind, KINDS)}"
        )

    def keep(implementation: F) -> F:
        if not callable(implementation):
            raise UsageError(
                f"register({kind!r}, {name!r}): {type(implementation).__name__} cannot be called"
            )
        module = getattr(implementation, "__module__", None) or "?"
        before = _REGISTERED.get((kind, name))
        owner = before.module if before else _own_module(kind, name) or module
        if owner != module:
            raise UsageError(
                f"register({kind!r}, {name!r}): {owner} has registered one already; rename one"
            )
        _REGISTERED[kind, name] = Registered(
            kind, name, module, implementation, **about
        )
        return implementation

    return keep


@cache
def _own_names(kind: str) -> tuple[str, ...]:
    """Return the names of Weft's own techniques of a kind from the files in its folder, without importing them."""
    folder = Path(__file__).parent / "techniques" / KINDS[kind].folder
    if not KINDS[kind].folder or not folder.is_dir():
        return ()
    stems = [path.stem for path in folder.iterdir() if _is_module(path)]
    return tuple(sorted(stem.removeprefix("_").replace("_", "-") for stem in stems))


def _is_module(path: Path) -> bool:
    if path.is_dir():
        return (path / "__init__.py").is_file()
    return path.suffix == ".py" and path.stem != "__init__"


def _own_module(kind: str, name: str) -> str:
    """Return the module of Weft's own technique of this name, or an empty string."""
    if name not in _own_names(kind):
        return ""
    stem = name.replace("-", "_")
    # a module's name cannot begin with a digit
    stem = f"_{stem}" if stem[0].isdigit() else stem
    return f"weft.techniques.{KINDS[kind].folder}.{stem}"


def names(kind: str) -> list[str]:
    """Return the names of all techniques of ``kind`` (a key of :data:`KINDS`): Weft's own, then those of loaded
    plugins.
    """
    own = _own_names(kind)
    return [*own, *(name for of, name in _REGISTERED if of == kind and name not in own)]


def setting_values(setting: str) -> list[str]:
    """Return a list of all values that ``setting`` can have, a setting (``section.key``) that names techniques.

    These are the techniques' names, and the values that Weft's core handles itself.
    """
    kinds = [kind for kind, what in KINDS.items() if what.setting == setting]
    values = [value for kind in kinds for value in KINDS[kind].choices(names(kind))]
    return list(dict.fromkeys(values))


def find(kind: str, name: str, setting: str = "") -> Registered:
    """Return the technique called ``name`` of the kind ``kind`` (a key of :data:`KINDS`), importing its file if
    necessary.

    ``setting``: the setting that names the technique, by default the setting of its kind. Raises :class:`UsageError` if
    there is no such technique, or if its file cannot be imported.
    """
    if (kind, name) not in _REGISTERED:
        what = KINDS[kind]
        module = _own_module(kind, name)
        if not module:
            raise UsageError(
                f"{what.setting} = {name!r} is not possible; {nearest(name, names(kind))}"
            )
        try:
            import_module(module)
        except ImportError as error:
            raise UsageError(
                f"{setting or f'{what.setting} = {name!r}'}: the {what.noun} cannot be imported ({error}); "
                f"choose another, or install Weft again"
            ) from None
    return _REGISTERED[kind, name]


def check_name(kind: str, name: object) -> None:
    """Raise pydantic's error for an unknown choice if no technique of ``kind`` is called ``name``.

    Values that the core handles itself are accepted, too.
    """
    choices = KINDS[kind].choices(names(kind))
    if name not in choices:
        expected = ", ".join(map(repr, choices))
        raise PydanticKnownError("literal_error", {"expected": expected})


def declared(kind: str) -> Iterator[Registered]:
    """Yield every technique of a kind, except techniques whose file cannot be imported."""
    for name in names(kind):
        try:
            yield find(kind, name)
        except UsageError:
            continue
