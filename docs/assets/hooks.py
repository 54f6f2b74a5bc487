"""What mkdocs does to pages besides: docstrings' roles become plain code."""

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    return re.sub(r":(?:class|func|data|mod|meth|attr):(<code>)~?", r"\1", html)
