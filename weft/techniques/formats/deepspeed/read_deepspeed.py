"""Reads DeepSpeed's checkpoints: either each rank's file of flat partitions, or universal ones."""

import re
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.boxes import MOMENTS
from weft.checkpoint.convert.foreign import Foreign, Stores, model_files, shape_beside
from weft.checkpoint.convert.rules import Shard, rule_and_names, sources_by_name
from weft.checkpoint.convert.shards import (
    Inert,
    StoredShard,
    as_stored,
    byte_range,
    load_tree,
    stored_shard,
)
from weft.checkpoint.source_format import newest_save
from weft.errors import WeftError
from weft.shapes.carried_files import CONFIG
from weft.shapes.parameters import whole_table

ZERO = r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"


def read_deepspeed(path: Path, config: Path | None) -> Foreign:
    """Return the model in the DeepSpeed checkpoint ``path``: partitions of ZeRO 0 to 3, or a universal checkpoint (a
    folder per parameter).

    ``config``: path of the model's ``config.json``; None: it is beside the checkpoint.
    """
    folder = newest_save(path)
    about = path if config or not (folder / CONFIG).is_file() else folder
    shape = shape_beside(about, config)
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
                    shard = stored_shard(
                        name, table[ours].shape, shard.dtype, shard.runs
                    )
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
    sources = sources_by_name(stores["fp32"], averages)
    number = int(step[1]) if step else 0
    return Foreign(
        "deepspeed", path, shape, sources, moments, number, model_files(about, config)
    )


def _zero(folder: Path) -> tuple[dict[str, Stores], list[str]]:
    """Return the tensors of DeepSpeed's ZeRO 0 to 3, and the name patterns of those that are means over tensor-parallel
    ranks.

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
        for name, other in (about.get("shared_params") or {}).items():
            for values in tensors.values():
                if other in values:
                    values.setdefault(name, values[other])
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
    """Return the parameters inside the partitions ``parts`` that ``files`` hold. Layout: DeepSpeed's
    zero_to_fp32.py.
    """
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
                tensors.setdefault(key, {})[name] = stored_shard(
                    name, size, dtype, where
                )
    return tensors
