"""Hugging Face's safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weft.checkpoint.source_format import SourceFormat
from weft.registry import register

if TYPE_CHECKING:
    from weft.checkpoint.convert.foreign import Foreign


@register(
    "format",
    "hf",
    title="Hugging Face's safetensors, read",
    paper="Wolf et al. 2020 (transformers)",
    recipe="weft checkpoint convert SOURCE --from hf --out OUT",
    proof="tests/checkpoint/test_convert.py",
    figure="the same bytes there and back, through Weft and DCP",
)
class HuggingFace(SourceFormat):
    """Reads models in folders of Hugging Face: safetensors files, configuration and tokenizer."""

    patterns = ("model.safetensors.index.json", "model.safetensors")
    place = 40

    @staticmethod
    def open(path: Path, config: Path | None) -> Foreign:
        import torch

        from weft.checkpoint.convert.foreign import Foreign, model_files, shape_beside
        from weft.checkpoint.convert.rules import Shard, sources_by_name
        from weft.layout.dims import Logical, whole_box
        from weft.layout.mesh import Mesh
        from weft.models.hugging_face import check_stored, hf_values
        from weft.models.transformer import Transformer

        def shard(name: str, logical: Logical) -> Shard:
            def read(lo: int, hi: int) -> torch.Tensor:
                # Opened anew for every read: a mapping that stays keeps all it has read in memory.
                return hf_values(path, shape)(
                    name, logical, ((lo, hi), *whole_box(logical.shape[1:]))
                )

            return Shard(logical.shape, read(0, 1).dtype, read)

        shape = shape_beside(path, config)
        check_stored(path, shape)
        names = dict(Transformer(shape, Mesh.single()).logical_parameters())
        sources = sources_by_name(
            {name: [shard(name, stored)] for name, stored in names.items()}
        )
        return Foreign("hf", path, shape, sources, files=model_files(path, config))
