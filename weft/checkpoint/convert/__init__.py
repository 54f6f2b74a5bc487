"""Convert checkpoints of other programs from and to Weft's, with one tensor in memory at a time.

:mod:`.rules` maps names of foreign tensors, :mod:`.shards` and :mod:`.sources` find their bytes, and :mod:`.write`
writes folders of Weft, Hugging Face and DCP.
"""

from weft.checkpoint.convert.foreign import Foreign
from weft.checkpoint.convert.sources import open_foreign
from weft.checkpoint.convert.write import convert, export_dcp

__all__ = ["Foreign", "convert", "export_dcp", "open_foreign"]
