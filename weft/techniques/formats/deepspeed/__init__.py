"""DeepSpeed's checkpoints, those of ZeRO and universal ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weft.checkpoint.source_format import SourceFormat
from weft.registry import register

if TYPE_CHECKING:
    from weft.checkpoint.convert.foreign import Foreign


@register(
    "format",
    "deepspeed",
    title="DeepSpeed's checkpoints, of ZeRO and universal ones, read",
    paper="Lian et al. 2024 (DeepSpeed)",
    recipe="weft checkpoint convert SOURCE --from deepspeed --out OUT",
    proof="tests/checkpoint/test_convert.py",
    figure=(
        "weights and moments to the last bit, of every stage, with 1 to 3 ranks, and "
        "of universal checkpoints"
    ),
)
class DeepSpeed(SourceFormat):
    """Reads DeepSpeed's checkpoints: the partitions that ZeRO writes, and universal checkpoints."""

    patterns = ("*_optim_states.pt", "mp_rank_*_model_states.pt", "zero/*/fp32.pt")
    place = 30

    @staticmethod
    def open(path: Path, config: Path | None) -> Foreign:
        from weft.techniques.formats.deepspeed.read_deepspeed import read_deepspeed

        return read_deepspeed(path, config)
