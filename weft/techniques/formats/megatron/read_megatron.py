"""Reads Megatron-LM's checkpoints, in which every rank has a shard of every tensor of its stage."""

import re
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.convert.foreign import Foreign, Stores, model_files, shape_beside
from weft.checkpoint.convert.rules import sources_by_name
from weft.checkpoint.convert.shards import as_stored, load_tree
from weft.checkpoint.source_format import newest_save
from weft.errors import WeftError
from weft.shapes.foreign_names import LAYER


def read_megatron(path: Path, config: Path | None) -> Foreign:
    """Return the model in the Megatron-LM checkpoint ``path``, which consists of files
    ``mp_rank_TP[_PP]/model_optim_rng.pt``.

    Every pipeline stage and virtual stage numbers its blocks from 0. ``config``: path of the model's ``config.json``;
    None: it is beside the checkpoint.
    """
    folder = newest_save(path)
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
    sources, about = (
        sources_by_name(shards),
        (path if folder == path else folder, config),
    )
    return Foreign(
        "megatron", path, shape_beside(*about), sources, files=model_files(*about)
    )
