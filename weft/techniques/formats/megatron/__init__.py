"""Megatron-LM's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weft.checkpoint.source_format import SourceFormat
from weft.registry import register

if TYPE_CHECKING:
    from weft.checkpoint.convert.foreign import Foreign


@register(
    "format",
    "megatron",
    title="Megatron-LM's checkpoints, read",
    paper="Shoeybi et al. 2019 (Megatron-LM)",
    recipe="weft checkpoint convert SOURCE --from megatron --out OUT",
    proof="tests/checkpoint/test_convert.py",
    figure=(
        "weights to the last bit, of seven layouts of tensor, pipeline and virtual "
        "ranks"
    ),
)
class Megatron(SourceFormat):
    """Reads Megatron-LM's checkpoints, whose files belong to ranks of tensor and pipeline parallelism."""

    patterns = ("mp_rank_*/model_optim_rng.pt",)
    place = 20

    @staticmethod
    def open(path: Path, config: Path | None) -> Foreign:
        from weft.techniques.formats.megatron.read_megatron import read_megatron

        return read_megatron(path, config)
