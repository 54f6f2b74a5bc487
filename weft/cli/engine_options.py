"""The options of the commands that hold an engine, ``weft serve`` and ``weft engine``."""

import functools
import inspect
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.arguments import (
    Ahead,
    Attention,
    Draft,
    EarlyLayer,
    Ema,
    LayersIn,
    LeastRate,
    ModelName,
    Neurons,
    NeuronsIn,
    PluginModules,
    Predictor,
    Spread,
    Weights,
    Window,
    import_plugins,
)
from weft.cli.cache_policy_option import CachePolicyWord
from weft.errors import UsageError

if TYPE_CHECKING:
    from weft.generate.open_engine import EngineOptions

Requests = Annotated[
    int,
    typer.Option(
        "--requests",
        min=1,
        help="Largest number of answers that are written at the same time.",
    ),
]
Waiting = Annotated[
    int,
    typer.Option(
        "--waiting",
        min=0,
        help="Largest number of answers that may wait; further requests are refused with 429.",
    ),
]
Budget = Annotated[
    int,
    typer.Option(
        "--budget",
        min=1,
        help="Largest number of tokens per step; longer prompts are read in pieces.",
    ),
]
_policy = (
    "Which tokens a step computes first. exact-fill: new tokens, then "
    "prompts, cut where the budget ends; chunked:N: new tokens and at most N "
    "of one prompt; prompts-first: prompts, then new tokens; urgency: the "
    "requests whose workflow has least time left."
)
PolicyWord = Annotated[
    str,
    typer.Option(
        "--policy", metavar="exact-fill|chunked:N|prompts-first|urgency", help=_policy
    ),
]
CacheTokens = Annotated[
    int,
    typer.Option("--cache", min=0, help="Tokens in the cache; 0: by the free memory."),
]
_adapters = (
    "A folder of adapters in PEFT's format; each is served as a model with "
    "its folder's name."
)
Adapters = Annotated[
    Path | None, typer.Option("--adapters", metavar="FOLDER", help=_adapters)
]
_models = (
    "A folder of models of the same shape and tokenizer, such as fine-tunes; "
    "each is served by its folder's name. Weights that are equal are in "
    "memory once."
)
Models = Annotated[
    Path | None, typer.Option("--models", metavar="FOLDER", help=_models)
]
_host_cache = (
    "Keep cached prefixes in so many GB of each engine's host memory too, for when "
    "the cache needs their room."
)
HostCache = Annotated[
    float, typer.Option("--host-cache", min=0, metavar="GB", help=_host_cache)
]
_cache_folder = (
    "Keep cached prefixes in files of this folder, which all engines on this machine "
    "and the next start use too. Who can read the files can learn users' texts."
)
CacheFolder = Annotated[
    Path | None, typer.Option("--cache-folder", metavar="FOLDER", help=_cache_folder)
]
_cache_files = "Largest size of these files together in GB, 20 if not given; those read longest ago are removed first."
CacheFolderSize = Annotated[
    float | None,
    typer.Option("--cache-folder-size", min=0, metavar="GB", help=_cache_files),
]
_invariant = (
    "Make log-probabilities independent of other requests, to the last bit; slower."
)
Invariant = Annotated[bool, typer.Option("--invariant", help=_invariant)]
_lend = (
    "Let engines lend each other blocks of their caches: texts may be longer "
    "than the cache of one engine."
)
Lend = Annotated[bool, typer.Option("--lend", help=_lend)]

_phases = (
    "one: each step reads prompts and writes. split: a second process reads "
    "prompts while this one writes, with the same weights and cache in shared "
    "memory; on Linux, without a GPU."
)
Phases = Annotated[str, typer.Option("--phases", metavar="one|split", help=_phases)]
_quota = (
    "With --phases split: the share of the cores that prompts may use while "
    "other texts are written, from 0.1 to 0.9, or what chooses it while the "
    "server runs."
)
QuotaWord = Annotated[str, typer.Option("--quota", metavar="NUMBER|NAME", help=_quota)]

_keys_in = (
    "Let the keys and values of old tokens rest in files of these folders, one process for each, which "
    "attends to them there: memory does not grow with the length of texts. Settings follow: "
    "cached=GB read through the page cache, size=GB of each file, rate=TOKENS/S that the disks must do."
)


def _refuse_empty(
    context: typer.Context, option: typer.CallbackParam, value: str
) -> str:
    """Return ``value``; raise :class:`UsageError` if it is an empty text that was given, as by an unset variable."""
    source = context.get_parameter_source(option.name or "")
    if not value and source is not None and source.name == "COMMANDLINE":
        raise UsageError(f"{option.opts[0]} is empty; give a value, or leave it out")
    return value


KeysIn = Annotated[
    str,
    typer.Option(
        "--keys-in",
        metavar="FOLDER[,FOLDER,...]",
        help=_keys_in,
        callback=_refuse_empty,
    ),
]


class OnOff(StrEnum):
    """Values of a command-line option that is switched on or off: "on" and "off"."""

    on = "on"
    off = "off"


_graphs = (
    "on: on a GPU, steps in which each answer grows by one token are recorded as CUDA "
    "graphs at the start, and launched as a whole; off: kernel by kernel."
)
CudaGraphs = Annotated[OnOff, typer.Option("--cuda-graphs", help=_graphs)]


def read_engine_options(
    checkpoint: Annotated[str, ModelName],
    requests: Requests = 64,
    waiting: Waiting = 960,
    budget: Budget = 512,
    policy: PolicyWord = "exact-fill",
    cache: CacheTokens = 0,
    host_cache: HostCache = 0,
    cache_folder: CacheFolder = None,
    cache_folder_size: CacheFolderSize = None,
    adapters: Adapters = None,
    models: Models = None,
    ema: Ema = False,
    weights: Weights = "float",
    invariant: Invariant = False,
    draft: Draft = "",
    ahead: Ahead = 0,
    early_layer: EarlyLayer = 0,
    plugin: PluginModules = None,
    layout: Spread = None,
    lend: Lend = False,
    cuda_graphs: CudaGraphs = OnOff.on,
    attention: Attention = "",
    cache_policy: CachePolicyWord = "none",
    phases: Phases = "one",
    quota: QuotaWord = "",
    layers_in: LayersIn = None,
    window: Window = None,
    least_rate: LeastRate = None,
    keys_in: KeysIn = "",
    neurons_in: NeuronsIn = None,
    neurons: Neurons = None,
    predictor: Predictor = None,
) -> "EngineOptions":
    """Import the modules of ``--plugin``, and return the options of an engine, checked as far as possible without the
    model.

    The parameters are the options of the command line, which :func:`holding_engine` adds to a command. Raises
    :class:`UsageError` for options that are wrong on their own or conflict.
    """
    from weft.generate.open_engine import EngineOptions

    import_plugins(plugin)
    options = EngineOptions(
        checkpoint=checkpoint,
        requests=requests,
        waiting=waiting,
        budget=budget,
        policy=policy,
        cache=cache,
        host_cache=host_cache,
        cache_folder=cache_folder,
        cache_folder_size=cache_folder_size,
        adapters=adapters,
        models=models,
        ema=ema,
        weights=weights,
        invariant=invariant,
        draft=draft,
        ahead=ahead,
        early_layer=early_layer,
        plugins=tuple(plugin or ()),
        layout=layout or "",
        lend=lend,
        cuda_graphs=cuda_graphs.value,
        attention=attention,
        cache_policy=cache_policy,
        phases=phases,
        quota=quota,
        layers_in=layers_in,
        window=window,
        least_rate=least_rate,
        keys_in=keys_in,
        neurons_in=neurons_in,
        neurons=neurons,
        predictor=predictor,
    )
    options.check()
    return options


def holding_engine(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options of an engine to ``command``, whose first parameter then gets them as one :class:`EngineOptions`.

    The model's name stays the first parameter, and the command's own options come before the others.
    """
    shared = inspect.signature(read_engine_options).parameters
    _, *own = inspect.signature(command).parameters.values()
    model, *others = shared.values()
    named = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *others)
    ]
    signature = inspect.Signature([model, *named], return_annotation=int)

    @functools.wraps(command)
    def run(*given: Any, **named: Any) -> int:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        values = bound.arguments
        options = read_engine_options(**{name: values.pop(name) for name in shared})
        return command(options, **values)

    # what Typer reads
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {
        name: parameter.annotation for name, parameter in signature.parameters.items()
    }
    return run
