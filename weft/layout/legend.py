"""What the words of a layout mean, for pages that show layouts."""

import re
from collections.abc import Iterable

from weft.layout.layout import Layout


def layout_legend(texts: Iterable[object]) -> dict[str, str]:
    """Return the meaning of every layout field, such as ``shard``, that is named in ``texts``, in a fixed order.

    ``texts``: layouts, written as ``shard=2,tp=2``.
    """
    words = {word for text in texts for word in re.findall(r"(\w+)=", str(text))}
    return {
        name: field.description or ""
        for name, field in Layout.model_fields.items()
        if name in words
    }
