"""llama.cpp's GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from weft.checkpoint.source_format import SourceFormat
from weft.registry import register

if TYPE_CHECKING:
    from weft.checkpoint.convert.foreign import Foreign


@register(
    "format",
    "gguf",
    title="llama.cpp's GGUF files, read",
    paper="GGUF",
    recipe="weft checkpoint convert SOURCE --from gguf --out OUT",
    proof="tests/checkpoint/test_convert.py",
    figure=("weights to the last bit of what the gguf package decodes, in six kinds"),
)
class Gguf(SourceFormat):
    """Reads models in llama.cpp's GGUF files, with their tokenizers."""

    patterns = ("*.gguf",)
    suffix = ".gguf"
    place = 50

    @staticmethod
    def open(path: Path, config: Path | None) -> Foreign:
        from weft.checkpoint.convert.foreign import Foreign
        from weft.checkpoint.convert.gguf_file import SAMPLING, gguf_shape, read_gguf
        from weft.checkpoint.convert.rules import sources_by_name
        from weft.data.gguf_tokenizer import gguf_tokenizer
        from weft.data.tokenizer import NO_TOKENIZER
        from weft.errors import WeftError
        from weft.models.hugging_face import files_beside
        from weft.shapes.carried_files import CONFIG, GENERATION, TOKEN_IDS, as_json
        from weft.shapes.config import config_from_shape, shape_from_config

        file = path if path.is_file() else min(path.glob("*.gguf"), default=path)
        fields, tensors = read_gguf(file)
        shape = (
            shape_from_config(config) if config else gguf_shape(file, fields, tensors)
        )
        try:
            files = gguf_tokenizer(fields)
        except (WeftError, KeyError, ValueError, IndexError, TypeError) as error:
            # The weights are good without it; whoever needs the tokenizer says that there is none.
            files = {NO_TOKENIZER: str(error).encode()}
        if sampling := {
            name: fields[theirs]
            for theirs, name in SAMPLING.items()
            if theirs in fields
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
