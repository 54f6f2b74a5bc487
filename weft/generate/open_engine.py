"""Opens a model and builds the engine that a command asks for, on one rank or on several."""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from weft.checkpoint.convert.peft import is_adapter, read_adapter
from weft.checkpoint.model import open_model, tokenizer_of
from weft.checkpoint.model_family import FamilyMember, ModelFamily, model_folders
from weft.errors import UsageError, nearest
from weft.generate.block_files import make_cache_folder
from weft.generate.cache_policy import NONE, cache_policy_of, check_alone
from weft.generate.core_share import own_cores
from weft.generate.drafter import check_ahead, drafter_for
from weft.generate.engine import Engine, check_prompt
from weft.generate.fingerprint import open_for_reading, weights_fingerprint
from weft.generate.keys_at_rest import FILE_GB, RestingKeys, hold_adapters, rest_keys
from weft.generate.leader import follow_leader
from weft.generate.many_models import Room, add_models, members_of
from weft.generate.outside_cache import OutsideCache, keep_blocks
from weft.generate.policies import policy_of
from weft.generate.prefill_process import PrefillProcess
from weft.generate.quotas import FixedQuota, quota_of
from weft.generate.shared_model import SharedModel, share_model
from weft.generate.split_phases import SplitPhases
from weft.generate.start import leads, mesh_for
from weft.generate.weights_elsewhere import (
    RestingWeights,
    WeightsElsewhere,
    lift_of,
    tell_about,
)
from weft.layout.layout import Layout
from weft.memory.heap import use_huge_pages
from weft.models.attention_backend import check_attention
from weft.models.products import NARROW, read_only
from weft.models.transformer import Transformer
from weft.run.signals import leave_signals_to_others
from weft.shapes.carried_files import context_length
from weft.train.expert_set import (
    OpenedExperts,
    open_experts,
    read_expert_set,
    refuse_beside_experts,
)

#: The share of the free memory that the cache may fill.
SHARE = 0.4
#: In how many processes an engine computes: prompts and writing in one, or each in its own.
PHASES = ("one", "split")
#: Options of an engine that only keeps blocks for others.
OF_CACHE = (
    "checkpoint", "ema", "weights", "cache_policy", "host_cache", "cache_folder", "cache_folder_size", "plugins",
)  # fmt: skip
#: GB of the files in which cache blocks are kept, if nothing else is said.
FOLDER_GB = 20.0


@dataclass(frozen=True, kw_only=True)
class EngineOptions(RestingWeights):
    """Options of the commands that hold an engine, as the user has given them.

    Attributes:
        ``checkpoint``: the model's name.
        ``requests``: largest number of answers that are written at the same time.
        ``waiting``: largest number of answers that may wait.
        ``budget``: largest number of tokens of a step.
        ``policy``: name of the scheduling policy, with its argument.
        ``cache``: tokens of the cache; 0: as many as the free memory holds.
        ``adapters``: folder of adapters, or None.
        ``models``: folder of further models of the same shape, or None.
        ``ema``: whether the averages of the parameters are loaded.
        ``weights``: type of the weights.
        ``invariant``: whether log-probabilities do not depend on other requests.
        ``draft``: name of the drafter, or of a small model; "": none.
        ``ahead``: number of likely tokens from which a small model continues while drafts are checked.
        ``early_layer``: number of layers of the model after which it predicts these likely tokens; 0: the small model
            predicts them.
        ``plugins``: modules that register techniques.
        ``layout``: text of the layout.
        ``resident``: room for the models in memory, as :meth:`Room.parse` reads it; "": all have room.
        ``host_cache``: GB of host memory in which cache blocks are kept.
        ``cache_folder``: folder in whose files cache blocks are kept, or None.
        ``cache_folder_size``: largest size of these files together, in GB; None: :data:`FOLDER_GB`.
        ``lend``: whether engines lend each other blocks of their caches.
        ``cuda_graphs``: "on" or "off": whether decode steps are recorded as CUDA graphs, if this is possible.
        ``attention``: name of the attention backend; "": the fastest one.
        ``cache_policy``: name of the cache policy, with its argument.
        ``phases``: "split" if a second process reads prompts, else "one".
        ``quota``: share of the cores for the process that reads prompts, or the name of a controller that chooses it;
            "": half of the cores.
        ``keys_in``: where old keys and values rest, as :meth:`RestingKeys.parse` reads it; "": in the cache.
    """

    checkpoint: str
    requests: int
    waiting: int
    budget: int
    policy: str
    cache: int
    adapters: Path | None
    models: Path | None
    ema: bool
    weights: str
    invariant: bool
    draft: str
    ahead: int
    early_layer: int
    plugins: tuple[str, ...]
    layout: str
    resident: str = ""
    host_cache: float = 0.0
    cache_folder: Path | None = None
    cache_folder_size: float | None = None
    lend: bool = False
    cuda_graphs: str = "on"
    attention: str = ""
    cache_policy: str = NONE
    phases: str = "one"
    quota: str = ""
    keys_in: str = ""

    @property
    def elsewhere(self) -> WeightsElsewhere:
        """Options that say where weights rest while the engine generates."""
        names = [field.name for field in fields(RestingWeights)]
        return WeightsElsewhere(**{name: getattr(self, name) for name in names})

    @property
    def spread(self) -> Layout:
        """Layout of the ranks over which the model is cut. Raises :class:`UsageError` if the text of the option
        ``--layout`` describes no layout.
        """
        return Layout.parse(self.layout)

    @property
    def most(self) -> int:
        """Largest number of answers that may be written or wait at the same time."""
        return self.requests + self.waiting

    def check(self) -> None:
        """Raise :class:`UsageError` for options that are wrong on their own or conflict, before any model is opened."""
        self._check_cache_policy()
        if self.invariant and self.spread.world > 1:
            raise UsageError(
                "--invariant is for a model on one rank; leave out --layout"
            )
        if self.weights == NARROW and (self.models or self.invariant):
            raise UsageError(
                "--weights bfloat16 is for one model, without --invariant; leave these out"
            )
        if self.lend and (self.spread.world > 1 or self.invariant):
            raise UsageError(
                "--lend is for engines on one rank, without --invariant; leave these out"
            )
        if self.models and (self.spread.world > 1 or self.invariant):
            raise UsageError(
                "--models is for one rank, without --invariant; leave these out"
            )
        if self.models:
            model_folders(self.models, lambda line: None)
        if self.resident:
            Room.parse(self.resident)
            if not self.models:
                raise UsageError(
                    "--resident is for --models FOLDER; give both, or leave it out"
                )
        if self.cache_folder_size is not None and self.cache_folder is None:
            raise UsageError(
                "--cache-folder-size is about a folder; give --cache-folder FOLDER too"
            )
        check_attention(self.attention, self.invariant, self.spread.world > 1)
        self._check_phases()
        beside = {"--models": self.models, "--phases split": self.phases == "split"}
        if self.neurons_in:
            beside |= {"--adapters": self.adapters, "--invariant": self.invariant}
        self.elsewhere.check(self.weights, self.spread, "", beside)
        self._check_keys()
        check_ahead(self.draft, self.ahead, self.early_layer, self.spread.world)
        policy_of(self.policy)

    def check_folders(self) -> None:
        """Raise :class:`weft.errors.WeftError` for a folder of keys that can have no file, before the weights are
        read. Missing folders are created.
        """
        if self.keys_in:
            RestingKeys.parse(self.keys_in).check_folders()
        if self.cache_folder is not None:
            make_cache_folder(self.cache_folder)

    @property
    def numerics(self) -> str:
        """A text that names all settings beside the weights that change a model's results: the type of the weights in
        use, and the cache policy.
        """
        if self.cache_policy == NONE:
            return self.weights
        return f"{self.weights} {self.cache_policy}"

    def _check_cache_policy(self) -> None:
        alone = {
            "--invariant": self.invariant, "--lend": self.lend, "--models": self.models,
            "--phases split": self.phases == "split", "cp in --layout": self.spread.cp > 1,
        }  # fmt: skip
        kept = {
            "--draft": self.draft, "--host-cache": self.host_cache, "--cache-folder": self.cache_folder,
        }  # fmt: skip
        check_alone(self.cache_policy, alone, kept)

    def check_moves(self) -> None:
        """Raise :class:`UsageError` if texts cannot move to another engine because the cache policy remembers more of
        them than their blocks.
        """
        check_alone(self.cache_policy, {}, {"engines between which texts move": True})

    def _check_keys(self) -> None:
        if not self.keys_in:
            return
        RestingKeys.parse(self.keys_in)
        refused = {
            "--layout": self.spread.world > 1, "--invariant": self.invariant, "--lend": self.lend,
            "--phases": self.phases == "split", "--cache-policy": self.cache_policy != NONE,
        }  # fmt: skip
        for option, given in refused.items():
            if given:
                raise UsageError(
                    f"--keys-in is for one process on one rank that attends to all keys; leave out {option}"
                )

    def _check_phases(self) -> None:
        if self.phases not in PHASES:
            raise UsageError(
                f"--phases cannot be {self.phases!r}; {nearest(self.phases, PHASES, True)}"
            )
        if self.phases != "split":
            if self.quota:
                raise UsageError("--quota is for --phases split; give both, or neither")
            return
        if self.quota:
            quota_of(self.quota)
        refused = {
            "--layout": self.spread.world > 1, "--invariant": self.invariant, "--adapters": self.adapters,
            "--models": self.models, "--lend": self.lend, "--weights": self.weights != "float",
        }  # fmt: skip
        for option, given in refused.items():
            if given:
                raise UsageError(
                    f"--phases split is for one model in its own precision on one rank; leave out {option}"
                )

    def words(self, role: str = "") -> list[str]:
        """Return these options as arguments of ``weft engine --role`` with this ``role``. :attr:`resident` is left out,
        and a cache engine gets only the options in :data:`OF_CACHE`.
        """
        words = []
        for field in fields(self):
            name, value = field.name.replace("_", "-"), getattr(self, field.name)
            if role == "cache" and field.name not in OF_CACHE:
                continue
            if name == "plugins":
                words += [f"--plugin={module}" for module in value]
            elif isinstance(value, bool):
                words += [f"--{name}"] * value
            elif value not in (None, "") and name != "resident":
                words.append(f"--{name}={value}")
        return words


class OpenedEngine(NamedTuple):
    """An engine that has been opened with its model.

    Attributes:
        ``engine``: the engine.
        ``files``: contents of the small files beside the model's weights, by file name.
        ``cache``: number of tokens that the engine's cache holds.
        ``others``: names of the engine's other models and adapters.
        ``family``: the models of the same shape that the engine may have; None if there is only one model.
        ``resting``: by name, the models of the family that come into memory only when a request names them.
        ``kept``: where the engine keeps cache blocks beside its cache; None: nowhere.
    """

    engine: Engine
    files: dict[str, bytes]
    cache: int
    others: list[str]
    family: ModelFamily | None
    resting: dict[str, FamilyMember]
    kept: OutsideCache | None


def open_engine(
    options: EngineOptions,
    device: str,
    name: str,
    warn: Callable[[str], None],
    share: float = SHARE,
) -> OpenedEngine | None:
    """Open the model of ``options`` on ``device`` and build its engine. On other ranks than the first, follow the first
    rank until it ends, and return None.

    ``name``: the model's name, which no adapter may have. ``share``: part of the free memory for the cache, if its size
    is not given. ``warn`` prints a line.
    """
    import psutil
    import torch

    spread = options.spread
    mesh = mesh_for(spread, device, options.checkpoint)
    options.check_folders()
    parts = options.elsewhere.parts(options.weights)
    experts = _experts_of(options, device, warn)
    if experts:
        model, files = experts.models[0], experts.files
    else:
        model, files, _ = open_model(
            options.checkpoint, device, warn, options.ema, mesh, lift_of(parts)
        )
    if leads():
        tell_about(parts, warn)
    if model.shape.output == "score":
        return _opened_scorer(options, model, files)
    check_prompt(model, [0])
    family = ModelFamily(model, options.weights) if options.models else None
    model = family.base if family else model
    shared = share_model(model) if options.phases == "split" else None
    read_only(model, options.weights)
    if device == "cpu":
        use_huge_pages()
    if not leads():
        leave_signals_to_others()  # also those that come when it has ended
        follow_leader(model)
        return None
    engine = engine_class(experts)(
        model,
        options.cache or None,
        options.budget,
        options.requests,
        policy_of(options.policy),
        drafter=drafter_for(
            options.draft, model, warn, options.ahead, options.early_layer
        ),
        invariant=options.invariant,
        ranks=spread.world > 1,
        attention=options.attention,
        graphs=options.cuda_graphs == "on",
        cache_policy=cache_policy_of(options.cache_policy),
    )
    engine.report_to(warn)
    members = dict[str, FamilyMember]()
    if family and options.models:
        folders = model_folders(options.models, warn)
        tokenizer = tokenizer_of(files, options.checkpoint)
        members = members_of(family, folders, tokenizer, {name}, warn)
        if not options.resident:
            add_models(engine, family, members.values())
    others = [*members]
    cache = options.cache
    if options.keys_in:
        at_rest = RestingKeys.parse(options.keys_in)
        size = FILE_GB if at_rest.size is None else at_rest.size
        at_rest, longest = replace(at_rest, size=size), context_length(files) or 0
        rest_keys(engine, at_rest, options.requests, longest, warn, bool(cache))
        cache = (
            engine.scheduler.pool.blocks + engine.scheduler.borrowable
        ) * engine.reader.size
    if not cache:
        here = psutil.virtual_memory().available // int(
            os.environ.get("LOCAL_WORLD_SIZE", "1")
        )
        free = here if device == "cpu" else torch.cuda.mem_get_info()[0]
        cache = engine.fit(int(share * free))
    if options.adapters:
        others += add_adapters(engine, options.adapters, name)
        if options.keys_in and not options.cache:
            hold_adapters(engine)
    keeps = options.host_cache or options.cache_folder
    kept = keep_opened(engine, options, warn) if keeps else None
    if shared is not None:
        split_engine(engine, shared, options.quota, warn)
    resting = members if options.resident else {}
    engine.record_steps()
    return OpenedEngine(engine, files, cache, others, family, resting, kept)


def engine_class(experts: OpenedExperts | None) -> Callable[..., Engine]:
    """Return the function that builds an engine from the arguments of :class:`Engine`. ``experts``: models that write
    texts together; None: the engine has one model.
    """
    if experts is None:
        return Engine
    from weft.generate.expert_engine import ExpertEngine

    return partial(ExpertEngine, experts)


def _experts_of(
    options: EngineOptions, device: str, warn: Callable[[str], None]
) -> OpenedExperts | None:
    """Open the experts of a set; None if the options name a single model.

    Raises :class:`UsageError` for options of what a set has not.
    """
    if read_expert_set(options.checkpoint) is None:
        return None
    refused = {
        "--layout": options.spread.world > 1, "--phases": options.phases != "one", "--adapters": options.adapters,
        "--models": options.models, "--lend": options.lend, "--draft": options.draft,
        "--host-cache": options.host_cache, "--cache-folder": options.cache_folder,
        "--weights": options.weights != "float", "--cache-policy": options.cache_policy != NONE,
        "--keys-in": options.keys_in, "--layers-in": options.layers_in, "--neurons-in": options.neurons_in,
        "--invariant": options.invariant,
    }  # fmt: skip
    refuse_beside_experts(options.checkpoint, refused)
    return open_experts(options.checkpoint, device, warn, options.ema)


def _opened_scorer(
    options: EngineOptions, model: Transformer, files: dict[str, bytes]
) -> OpenedEngine:
    """Return an engine that scores texts with a reward model, and writes none.

    Raises :class:`UsageError` for options of what it has not: caches, adapters, ranks, drafts.
    """
    refused = {
        "--layout": options.spread.world > 1, "--phases": options.phases != "one", "--adapters": options.adapters,
        "--models": options.models, "--lend": options.lend, "--draft": options.draft,
        "--host-cache": options.host_cache, "--cache-folder": options.cache_folder,
        "--weights": options.weights != "float", "--cache-policy": options.cache_policy != NONE,
        "--keys-in": options.keys_in,
    }  # fmt: skip
    for option, given in refused.items():
        if given:
            raise UsageError(
                f"{options.checkpoint} is a reward model, which scores texts and writes none; leave out {option}"
            )
    engine = Engine(model, options.cache or None, options.budget, options.requests)
    tokens = options.cache or engine.reader.size
    return OpenedEngine(engine, files, tokens, [], None, {}, None)


def split_engine(
    engine: Engine, shared: SharedModel, quota: str, warn: Callable[[str], None]
) -> SplitPhases:
    """Let a second process read the prompts of ``engine``, and wait until it is ready. Return the object that takes the
    engine's steps from then on. ``shared``: the engine's model. ``quota``: value of ``--quota``, or "" for half of the
    cores. ``warn`` prints a line. Raises :class:`WeftError` if the process cannot be started.
    """
    cores = own_cores()
    process = PrefillProcess(engine, shared, cores, warn)
    controller = quota_of(quota) if quota else FixedQuota(0.5)
    phases = SplitPhases(engine, process, controller, cores)
    try:
        process.await_ready()
    except BaseException:
        process.close()
        raise
    return phases


def keep_opened(
    engine: Engine, options: EngineOptions, warn: Callable[[str], None]
) -> OutsideCache:
    """Keep copies of the cache blocks of ``engine`` in host memory or files, as ``options`` say, and return the object
    that does so. ``warn`` prints a line.
    """
    opened = open_for_reading(options.checkpoint, options.ema)
    weights = weights_fingerprint(opened, options.numerics)
    size = options.cache_folder_size
    most = FOLDER_GB if size is None else size
    return keep_blocks(
        engine,
        f"{weights} {options.invariant}",
        int(options.host_cache * 1e9),
        options.cache_folder,
        int(most * 1e9),
        warn,
    )


def adapter_folders(folder: Path, model: str) -> list[Path]:
    """Return the folders in ``folder`` that hold adapters. Raises :class:`UsageError` if there are none, or if one is
    named like the ``model``.
    """
    if not folder.is_dir():
        raise UsageError(f"--adapters {folder} is no folder")
    folders = sorted(path for path in folder.iterdir() if is_adapter(path))
    if not folders:
        raise UsageError(
            f"--adapters {folder} has no folder with an adapter as PEFT or `weft export` writes it"
        )
    for path in folders:
        if path.name == model:
            raise UsageError(
                f"the adapter {path} is named like the model; rename it, or give --name"
            )
    return folders


def adapter_digests(folder: Path | None, model: str) -> dict[str, str]:
    """Return a hash of the files of each adapter in ``folder``, by the adapter's name; empty without a folder.
    ``model``: name of the model, which no adapter may have.
    """
    digests = {}
    for path in adapter_folders(folder, model) if folder else ():
        digest = blake2b(digest_size=16)
        for file in sorted(path.iterdir()):
            if file.suffix in (".safetensors", ".json"):
                digest.update(file.name.encode() + b"\0" + file.read_bytes())
        digests[path.name] = digest.hexdigest()
    return digests


def model_digests(folder: Path | None) -> dict[str, str]:
    """Return the fingerprint of each model in ``folder``, by the model's name; empty without a folder."""
    folders = model_folders(folder, lambda line: None) if folder else []
    return {path.name: weights_fingerprint(open_for_reading(path)) for path in folders}


def add_adapters(engine: Engine, folder: Path, model: str) -> list[str]:
    """Add every adapter that has a folder of its own in ``folder`` to ``engine``, and return their names. No adapter
    may be named like the ``model``. Raises :class:`UsageError` for a folder without adapters, and for adapters of other
    models.
    """
    folders = adapter_folders(folder, model)
    for path in folders:
        engine.add_adapter(path.name, read_adapter(path, engine.model))
    return [path.name for path in folders]
