"""Opens checkpoints of other programs: the tensors that they hold, by Weft's names, each read when it is asked for."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.address import Where, open_storage
from weft.checkpoint.boxes import MOMENTS, ROOT
from weft.checkpoint.convert.gguf_file import SAMPLING, gguf_shape, read_gguf
from weft.checkpoint.convert.rules import (
    Shard,
    TensorSource,
    logical_tensor,
    rule_and_names,
    sources_by_name,
)
from weft.checkpoint.convert.shards import (
    Inert,
    Reader,
    StoredShard,
    as_stored,
    byte_range,
    load_tree,
    stored,
)
from weft.checkpoint.hub import local_path
from weft.checkpoint.storage import LocalStorage, Storage
from weft.checkpoint.store import (
    candidates,
    learned_length,
    model_of,
    open_checkpoint,
    stored_files,
)
from weft.data.gguf_tokenizer import gguf_tokenizer
from weft.data.tokenizer import NO_TOKENIZER
from weft.errors import UsageError, WeftError, nearest
from weft.layout.dims import Logical, whole_box
from weft.layout.mesh import Mesh
from weft.layout.parts import TORCH_DTYPES, Part
from weft.models.hf import (
    INDEX,
    SINGLE,
    check_stored,
    files_beside,
    hf_values,
    tokenizer_files,
)
from weft.models.transformer import Transformer
from weft.recipe import ModelShape
from weft.shapes.carried_files import CONFIG, GENERATION, TOKEN_IDS, as_json
from weft.shapes.config import config_from_shape, shape_from_config
from weft.shapes.foreign_names import LAYER
from weft.shapes.parameters import whole_table

#: The name of a moment in PyTorch's flattened optimizer state: it contains the parameter's name.
MOMENT = r"(?:(?:optimizer|optim|optimizers|optimizer_state_dict)\.)?state\.(.+)\.(exp_avg|exp_avg_sq)"
ZERO = r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"

Stores = dict[str, Sequence[Shard]]


@dataclass
class Foreign:
    """An open checkpoint. ``made``: where each parameter comes from; ``moments``: the same for each moment of the
    optimizer's state, if there is any; ``step``: the number of updates; ``files``: those beside the weights;
    ``length``: the context that it has learned with, where a run began its weights anew."""

    kind: str
    path: Path | Storage
    model: ModelShape
    made: Mapping[str, TensorSource]
    moments: Mapping[str, Mapping[str, TensorSource]] = field(default_factory=dict)
    step: int = 0
    files: Mapping[str, bytes] = field(default_factory=dict)
    length: int | None = None

    def __post_init__(self) -> None:
        self.table = whole_table(self.model)
        if missing := [name for name in self.table if name not in self.made]:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise WeftError(f"{self.path} has nothing for {', '.join(missing[:5])}{more}; the configuration is of "
                            "another model, or a file is missing")  # fmt: skip
        ignored = {"head"} if self.model.tied else set()
        if extra := [
            made.name
            for name, made in self.made.items()
            if name not in {*self.table, *ignored}
        ]:
            raise WeftError(f"{self.path} has tensors that the model has not: {', '.join(extra[:5])}; the "
                            "configuration is of another model")  # fmt: skip

    def read(
        self, name: str, dtype: torch.dtype | None = None, moment: str = ""
    ) -> torch.Tensor:
        """The whole parameter ``name``, or the ``moment`` of it, as stored or converted to ``dtype``."""
        made = self.moments[moment] if moment else self.made
        try:
            return logical_tensor(made[name], self.table[name].shape, self.model, dtype)
        except WeftError as error:
            raise (
                error
                if str(self.path) in str(error)
                else WeftError(f"{self.path}: {error}")
            ) from None


def open_foreign(
    source: Where, kind: str | None = None, config: Path | None = None
) -> Foreign:
    """Open what ``source`` holds; ``config`` is the model's ``config.json``, if there is none beside it.

    Only Weft's own checkpoints can be elsewhere than in a folder.
    """
    source = local_path(str(source))
    place, path = open_storage(source), Path(source)
    elsewhere = not isinstance(place, LocalStorage)
    if not (elsewhere or path.exists()):
        raise WeftError(f"{path} does not exist; give a checkpoint")
    kind = kind or ("weft" if elsewhere else kind_of(path))
    if kind is None:
        known = ", ".join(OPENERS)
        raise WeftError(
            f"{path} is no checkpoint that Weft knows ({known}); say which it is with --from"
        )
    if kind not in OPENERS:
        raise UsageError(f"--from {kind!r} is not possible; {nearest(kind, OPENERS)}")
    if elsewhere and kind != "weft":
        raise UsageError(
            f"--from {kind} reads folders only; copy {place} to this machine first"
        )
    try:
        return OPENERS[kind](place if elsewhere else path, config)
    except WeftError as error:
        raise (
            error if str(path) in str(error) else WeftError(f"{path}: {error}")
        ) from None


def kind_of(path: Path) -> str | None:
    """The kind of checkpoint that a file or folder seems to be, a key of :data:`OPENERS`; None if it is unknown."""
    folder = _tagged(path)
    if path.is_file():
        return "gguf" if path.suffix == ".gguf" else None
    for kind, patterns in {
        "weft": [ROOT, f"checkpoints/*/{ROOT}", f"*/{ROOT}"],
        "dcp": [".metadata"],
        "megatron": ["mp_rank_*/model_optim_rng.pt"],
        "deepspeed": [
            "*_optim_states.pt",
            "mp_rank_*_model_states.pt",
            "zero/*/fp32.pt",
        ],
        "hf": [INDEX, SINGLE],
        "gguf": ["*.gguf"],
    }.items():
        if any(any(folder.glob(pattern)) for pattern in patterns):
            return kind
    return None


def _tagged(path: Path) -> Path:
    """The folder of the newest save where ``path`` names it (DeepSpeed, Megatron), else ``path``."""
    for file in ("latest_universal", "latest", "latest_checkpointed_iteration.txt"):
        if (path / file).is_file():
            tag = (path / file).read_text(errors="replace").strip()
            numbered = file.endswith(".txt") and tag != "release"  # Megatron's
            return path / (f"iter_{tag:0>7}" if numbered else tag)
    return path


def _config(path: Path, config: Path | None) -> Path:
    """The ``config.json`` of the model that lies at ``path``."""
    folders = [path, path.parent] if path.is_dir() else [path.parent]
    file = config or next(
        (f / "config.json" for f in folders if (f / "config.json").is_file()), None
    )
    if file is None:
        raise WeftError(
            f"{path} has no config.json that says which model it is of; give one with --config"
        )
    return file


def _shape(path: Path, config: Path | None) -> ModelShape:
    return shape_from_config(_config(path, config))


def _files(path: Path, config: Path | None) -> dict[str, bytes]:
    """The model's files beside the weights at ``path``; ``config``: its ``config.json``, if it lies elsewhere."""
    file = _config(path, config)
    file = file / CONFIG if file.is_dir() else file
    return files_beside(file) | (tokenizer_files(path) if path.is_dir() else {})


def _hf(path: Path, config: Path | None) -> Foreign:
    def shard(name: str, logical: Logical) -> Shard:
        def read(lo: int, hi: int) -> torch.Tensor:
            # Opened anew for every read: a mapping that stays keeps all it has read in memory.
            return hf_values(path, shape)(
                name, logical, ((lo, hi), *whole_box(logical.shape[1:]))
            )

        return Shard(logical.shape, read(0, 1).dtype, read)

    shape = _shape(path, config)
    check_stored(path, shape)
    names = dict(Transformer(shape, Mesh.single()).logical_parameters())
    made = sources_by_name(
        {name: [shard(name, stored)] for name, stored in names.items()}
    )
    return Foreign("hf", path, shape, made, files=_files(path, config))


def _weft(where: Where, config: Path | None) -> Foreign:
    checkpoint = open_checkpoint(candidates(where)[0])

    def shard(name: str) -> Shard:
        about = checkpoint.tensors[name]
        dtype = TORCH_DTYPES[about.dtype]

        def read(lo: int, hi: int) -> torch.Tensor:
            out = torch.empty(hi - lo, *about.shape[1:], dtype=dtype)
            checkpoint.load(
                {name: Part(out, ((lo, hi), *whole_box(about.shape[1:])), about)}
            )
            return out

        return Shard(about.shape, dtype, read)

    def under(prefix: str) -> dict[str, TensorSource]:
        return sources_by_name(
            {
                n.removeprefix(prefix): [shard(n)]
                for n in checkpoint.tensors
                if n.startswith(prefix)
            }
        )

    if model_of(checkpoint).adapter is not None:
        raise WeftError(
            f"{checkpoint} is an adapter alone; weft export writes it as PEFT has it, and with --merge as a Hugging "
            "Face model, which can be converted"
        )
    moments = {
        moment: values
        for moment in MOMENTS
        if (values := under(f"optimizer.{moment}."))
    }
    step = int(checkpoint.meta.get("progress", {}).get("step", 0))
    files = stored_files(checkpoint)
    return Foreign("weft", checkpoint.storage, model_of(checkpoint), under("model."), moments, step, files,
                   learned_length(checkpoint))  # fmt: skip


def _dcp(path: Path, config: Path | None) -> Foreign:
    contents: dict[str, Stores] = {"model": {}, **{moment: {} for moment in MOMENTS}}
    for name, shard in Reader(path).tensors().items():
        if moment := re.fullmatch(MOMENT, name):
            contents[moment[2]][moment[1]] = [shard]
        elif shard.shape and not re.match(
            r"(?:optim|optimizers?|lr_scheduler|dataloader|train_state)\.", name
        ):
            contents["model"][name] = [shard]
    model, *moments = (sources_by_name(stores) for stores in contents.values())
    kept = {moment: made for moment, made in zip(MOMENTS, moments, strict=True) if made}
    return Foreign(
        "dcp", path, _shape(path, config), model, kept, files=_files(path, config)
    )


def _megatron(path: Path, config: Path | None) -> Foreign:
    """``mp_rank_TP[_PP]/model_optim_rng.pt``; blocks are numbered anew in every stage (and virtual stage)."""
    folder = _tagged(path)
    ranks: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for file in sorted(folder.glob("mp_rank_*/model_optim_rng.pt")):
        if not (match := re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?", file.parent.name)):
            raise WeftError(
                f"{file.parent} is of expert parallelism, which Weft does not have"
            )
        tree, known = load_tree(file), ("model", *(f"model{v}" for v in range(64)))
        parts = {
            key: tree[key]
            for key in known
            if isinstance(tree, dict) and isinstance(tree.get(key), dict)
        }
        ranks[int(match[1]), int(match[2] or 0)] = {
            key: {
                n: as_stored(n, t, file)
                for n, t in part.items()
                if isinstance(t, torch.Tensor)
            }
            for key, part in parts.items()
        }
    tp, pp = (max((key[axis] for key in ranks), default=-1) + 1 for axis in (0, 1))
    if not ranks or len(ranks) != tp * pp:
        raise WeftError(
            f"{folder} has {len(ranks)} of {tp} x {pp} mp_rank_* folders with model_optim_rng.pt"
        )
    shards: Stores = {}
    first = 0
    for key, stage in ((key, stage) for key in ranks[0, 0] for stage in range(pp)):
        blocks = set()
        for name in ranks[0, stage].get(key, {}):
            here = re.search(rf"\b{LAYER}", name)
            blocks |= {int(here[1])} if here else set()
            full = (
                name
                if here is None
                else name.replace(here[0], f"layers.{first + int(here[1])}.", 1)
            )
            try:
                shards[full] = [ranks[rank, stage][key][name] for rank in range(tp)]
            except KeyError:
                raise WeftError(
                    f"{folder}: tensor {name} of stage {stage} is not on every rank"
                ) from None
        first += len(blocks)
    made, about = sources_by_name(shards), (path if folder == path else folder, config)
    return Foreign("megatron", path, _shape(*about), made, files=_files(*about))


def _deepspeed(path: Path, config: Path | None) -> Foreign:
    folder = _tagged(path)
    about = path if config or not (folder / CONFIG).is_file() else folder
    shape = _shape(about, config)
    if (folder / "zero").is_dir():
        table = whole_table(shape)
        stores: dict[str, Stores] = {"fp32": {}, **{moment: {} for moment in MOMENTS}}
        for file in sorted(folder.glob("zero/*/*.pt")):
            if file.stem in stores:
                tree = load_tree(file)
                tensor = tree.get("param") if isinstance(tree, dict) else tree
                if not isinstance(tensor, torch.Tensor):
                    raise WeftError(f"{file} holds no parameter")
                name, shard = (
                    file.parent.name,
                    as_stored(file.parent.name, tensor, file),
                )
                (_, (ours, *_)) = rule_and_names(name) or (None, ("",))
                if (
                    shard.shape == (prod(shard.shape),)
                    and ours in table
                    and table[ours].numel == shard.shape[0]
                ):
                    # flat, where it was ZeRO 3
                    shard = stored(name, table[ours].shape, shard.dtype, shard.runs)
                stores[file.stem][name] = [shard]
        averages: list[str] = []
    else:
        stores, averages = _zero(folder)
    moments = {
        moment: sources_by_name(stores[moment], averages)
        for moment in MOMENTS
        if stores[moment]
    }
    step = re.search(r"(\d+)(?:_universal)?$", folder.name)
    made = sources_by_name(stores["fp32"], averages)
    number = int(step[1]) if step else 0
    return Foreign(
        "deepspeed", path, shape, made, moments, number, _files(about, config)
    )


def _zero(folder: Path) -> tuple[dict[str, Stores], list[str]]:
    """The tensors of DeepSpeed's ZeRO 0 to 3, and the name patterns of those that are means over tensor-parallel ranks.

    For each tensor-parallel rank every data rank has a file with its partition of the flat float32 groups.
    """
    stores: dict[str, Stores] = {"fp32": {}, **{moment: {} for moment in MOMENTS}}
    grid: dict[int, dict[int, Path]] = {}
    for file in folder.glob("*_optim_states.pt"):
        if ranks := re.fullmatch(ZERO, file.name):
            grid.setdefault(int(ranks[2]), {})[int(ranks[1])] = file
    columns: dict[str, dict[str, list[Shard]]] = {key: {} for key in stores}
    about: dict[str, Any] = {}
    models = sorted(folder.glob("mp_rank_*_model_states.pt")) or sorted(
        folder.glob("*zero_pp_rank_0_mp_rank_*_model_states.pt")
    )
    if not models or (grid and len(models) != len(grid)):
        raise WeftError(
            f"{folder} has {len(models)} *_model_states.pt files for {len(grid)} model-parallel ranks"
        )
    for rank, file in enumerate(models):
        about = load_tree(file)
        parts = (
            [
                load_tree(grid[rank][i])["optimizer_state_dict"]
                for i in sorted(grid[rank])
            ]
            if grid.get(rank)
            else []
        )
        tensors = (
            _unflatten(about, [grid[rank][i] for i in sorted(grid[rank])], parts)
            if parts
            else {}
        )
        whole = (
            about.get("module") if not parts else about.get("frozen_param_fragments")
        )
        for name, tensor in (whole or {}).items():
            if isinstance(tensor, torch.Tensor):
                tensors.setdefault("fp32", {})[name] = as_stored(name, tensor, file)
        for one, other in (about.get("shared_params") or {}).items():
            for values in tensors.values():
                if other in values:
                    values.setdefault(one, values[other])
        for key, values in tensors.items():
            for name, shard in values.items():
                columns[key].setdefault(name, []).append(shard)
    if uneven := [
        name for name, shards in columns["fp32"].items() if len(shards) != len(models)
    ]:
        raise WeftError(
            f"{folder}: tensor {uneven[0]} is not on every model-parallel rank; pipelines are not read"
        )
    about = about.get("universal_checkpoint_info") or {}
    return {**columns}, list(about.get("parameter_to_average_patterns", []))  # type: ignore[dict-item]


def _unflatten(
    about: Mapping[str, Any], files: Sequence[Path], parts: Sequence[Any]
) -> dict[str, dict[str, StoredShard]]:
    """The parameters inside the partitions ``parts`` that ``files`` hold. Layout: DeepSpeed's zero_to_fp32.py."""
    stage, count = parts[0].get("zero_stage"), parts[0].get("partition_count")
    # DeepSpeed's own enumeration
    stage = int(stage.args[0] if isinstance(stage, Inert) else stage or 0)
    count = max(count) if isinstance(count, list) else count
    if count != len(parts):
        raise WeftError(
            f"{files[0].parent} has {len(parts)} of {count} partitions; an *_optim_states.pt file is missing"
        )
    base, flats, groups = (
        "base_optimizer_state",
        "single_partition_of_fp32_groups",
        about["param_shapes"],
    )
    if stage == 3:
        base, flats = "optimizer_state_dict", "fp32_flat_groups"
        groups = [{name: size for group in groups for name, size in group.items()}]
    tensors: dict[str, dict[str, StoredShard]] = {"fp32": {}}
    for key in ("fp32", *MOMENTS):
        # of each rank, the flat tensors by group
        held: list[list[StoredShard]] = []
        for file, part in zip(files, parts, strict=True):
            flat = part[flats]
            if key != "fp32":
                state = part.get(base) or {}
                state = (
                    state.get("state", {})
                    if isinstance(state, dict)
                    else dict(enumerate(state))
                )
                flat = [state.get(i, {}).get(key) for i in range(len(flat))]
            if any(piece is None for piece in flat):
                break
            held.append([as_stored(key, piece, file) for piece in flat])
        if len(held) != len(parts):
            continue
        for i, group in enumerate(groups):
            at = 0
            flat_of_ranks = held if stage == 3 else [[of_rank[i]] for of_rank in held]
            runs = [
                [run for flat in of_rank for run in flat.runs]
                for of_rank in flat_of_ranks
            ]
            dtype = held[0][i].dtype
            for name, size in group.items():
                total = prod(size) * dtype.itemsize
                if stage < 3:
                    where = byte_range(
                        [r for piece in runs for r in piece], at, at + total
                    )
                    at += total
                else:  # every rank has a part of every parameter, the last one's filled up
                    share = -(-prod(size) // len(parts)) * dtype.itemsize
                    where = byte_range(
                        [
                            r
                            for piece in runs
                            for r in byte_range(piece, at, at + share)
                        ],
                        0,
                        total,
                    )
                    at += share
                tensors.setdefault(key, {})[name] = stored(name, size, dtype, where)
    return tensors


def _gguf(path: Path, config: Path | None) -> Foreign:
    file = path if path.is_file() else min(path.glob("*.gguf"), default=path)
    fields, tensors = read_gguf(file)
    shape = shape_from_config(config) if config else gguf_shape(file, fields, tensors)
    try:
        files = gguf_tokenizer(fields)
    except (WeftError, KeyError, ValueError, IndexError, TypeError) as error:
        # The weights are good without it; whoever needs the tokenizer says that there is none.
        files = {NO_TOKENIZER: str(error).encode()}
    if sampling := {
        name: fields[theirs] for theirs, name in SAMPLING.items() if theirs in fields
    }:
        files = dict(files) | {
            GENERATION: as_json(json.loads(files.get(GENERATION, b"{}")) | sampling)
        }
    if config:
        files = dict(files) | {CONFIG: files_beside(config)[CONFIG]}
    elif length := fields.get(f"{fields['general.architecture']}.context_length"):
        stored = next(iter(tensors["blk.0.attn_output.weight"])).dtype
        tokens = {
            key: value
            for key, value in json.loads(files.get(GENERATION, b"{}")).items()
            if key in TOKEN_IDS
        }
        files = dict(files) | {
            CONFIG: as_json(config_from_shape(shape, stored, tokens, int(length)))
        }
    return Foreign("gguf", path, shape, sources_by_name(tensors), files=files)


OPENERS: dict[str, Callable[[Any, Path | None], Foreign]] = {
    "weft": _weft, "hf": _hf, "dcp": _dcp, "deepspeed": _deepspeed, "megatron": _megatron, "gguf": _gguf,
}  # fmt: skip
