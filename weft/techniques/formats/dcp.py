"""PyTorch's distributed checkpoints (DCP)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from weft.checkpoint.source_format import SourceFormat
from weft.registry import register

if TYPE_CHECKING:
    from weft.checkpoint.convert.foreign import Foreign

#: The name of a moment in PyTorch's flattened optimizer state: it contains the parameter's name.
MOMENT = r"(?:(?:optimizer|optim|optimizers|optimizer_state_dict)\.)?state\.(.+)\.(exp_avg|exp_avg_sq)"


@register(
    "format",
    "dcp",
    title="PyTorch's distributed checkpoints, read",
    paper="PyTorch DCP",
    recipe="weft checkpoint convert SOURCE --from dcp --out OUT",
    proof="tests/checkpoint/test_convert.py",
    figure="weights and moments to the last bit, also those that several ranks saved",
)
class DistributedCheckpoint(SourceFormat):
    """Reads PyTorch's distributed checkpoints (DCP), for ``weft convert`` and for runs that start from other models."""

    patterns = (".metadata",)
    place = 10

    @staticmethod
    def open(path: Path, config: Path | None) -> Foreign:
        from weft.checkpoint.boxes import MOMENTS
        from weft.checkpoint.convert.foreign import (
            Foreign,
            Stores,
            model_files,
            shape_beside,
        )
        from weft.checkpoint.convert.rules import sources_by_name
        from weft.checkpoint.convert.shards import Reader

        contents: dict[str, Stores] = {
            "model": {},
            **{moment: {} for moment in MOMENTS},
        }
        for name, shard in Reader(path).tensors().items():
            if moment := re.fullmatch(MOMENT, name):
                contents[moment[2]][moment[1]] = [shard]
            elif shard.shape and not re.match(
                r"(?:optim|optimizers?|lr_scheduler|dataloader|train_state)\.", name
            ):
                contents["model"][name] = [shard]
        model, *moments = (sources_by_name(stores) for stores in contents.values())
        kept = {
            moment: source
            for moment, source in zip(MOMENTS, moments, strict=True)
            if source
        }
        return Foreign(
            "dcp",
            path,
            shape_beside(path, config),
            model,
            kept,
            files=model_files(path, config),
        )
