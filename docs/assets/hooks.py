"""What mkdocs does to pages besides: docstrings' roles become plain code, and long code in tables may break."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    html = re.sub(r":(?:class|func|data|mod|meth|attr):(<code>)~?", r"\1", html)
    return re.sub(
        r"<t([dh])\b.*?</t\1>", lambda cell: with_breaks(cell[0]), html, flags=re.DOTALL
    )


def with_breaks(cell: str) -> str:
    """Let the code in a table's ``cell`` break between the parts of paths, names and settings."""
    return re.sub(
        r"(?<=<code>)[^<]*(?=</code>)",
        lambda code: re.sub(
            r"(?<=[\w\]])([/_=,|]|&#124;|\.(?!\d))(?=\w)", r"\1<wbr>", code[0]
        ),
        cell,
    )
