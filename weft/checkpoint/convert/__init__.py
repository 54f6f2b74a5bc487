"""Checkpoints of other programs in and out, one tensor in memory at a time.

What a foreign tensor is follows from its name (:mod:`.rules`), where its bytes are from its container (:mod:`.shards`,
:mod:`.sources`); :mod:`.write` makes Weft's, Hugging Face's and DCP's folders of it.
"""

from weft.checkpoint.convert.foreign import Foreign
from weft.checkpoint.convert.sources import open_foreign
from weft.checkpoint.convert.write import convert, export_dcp

__all__ = ["Foreign", "convert", "export_dcp", "open_foreign"]
