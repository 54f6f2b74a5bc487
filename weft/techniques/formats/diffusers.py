"""Diffusion transformers of diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from weft.checkpoint.source_format import SourceFormat
from weft.registry import register

if TYPE_CHECKING:
    from weft.checkpoint.convert.foreign import Foreign
    from weft.shapes.parameters import Parameter


@register(
    "format",
    "diffusers",
    title="DiT and PixArt of diffusers, read",
    paper="Peebles & Xie 2023; Chen et al. 2024",
    recipe="weft checkpoint convert SOURCE --from diffusers --out OUT",
    proof="tests/diffusion/test_diffusers.py",
    figure="the same weights there and back",
)
class Diffusers(SourceFormat):
    """Reads models that diffusers has written as ``DiTTransformer2DModel`` or ``PixArtTransformer2DModel``, from their
    folder.
    """

    patterns = ("diffusion_pytorch_model.safetensors",)
    place = 45

    @staticmethod
    def open(path: Path, config: Path | None) -> Foreign:
        import torch

        from weft.checkpoint.convert.foreign import Foreign
        from weft.checkpoint.convert.rules import Shard, own_source
        from weft.errors import UsageError
        from weft.layout.dims import Logical, whole_box
        from weft.models.diffusers_weights import open_diffusers
        from weft.shapes.parameters import whole_table

        if config is not None:
            raise UsageError(
                "--config is for models of tokens; a folder of diffusers has its own config.json"
            )
        shape, values = open_diffusers(path)

        def shard(name: str, logical: Logical) -> Shard:
            def read(lo: int, hi: int) -> torch.Tensor:
                return values(name, logical, ((lo, hi), *whole_box(logical.shape[1:])))

            return Shard(logical.shape, torch.float32, read)

        def whole(row: Parameter) -> Logical:
            cuts = ((),) * len(row.dims)
            return Logical(row.dims, row.std, cuts, whole_box(row.shape))

        rows = whole_table(shape)
        sources = {
            name: own_source(name, shard(name, whole(row)))
            for name, row in rows.items()
        }
        return Foreign("diffusers", path, shape, sources)
