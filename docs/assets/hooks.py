"""What mkdocs does to pages besides: docstrings' roles become plain code, and long code in tables may break."""

import re
from typing import Any

#: Ends of the parts of paths, names and settings; not the point of a number or of a file's ending.
ENDS = re.compile(
    r"(?<=[\w\]])([/_=,|]|&#124;|\.(?!\d|(?:py|toml|jsonl?|csv|md|html|svg|txt)\b))(?=\w)"
)
#: Options, which browsers would break after their dashes.
OPTIONS = re.compile(r"(?<![\w-])--[\w-]+")


def on_page_content(html: str, **_: Any) -> str:
    html = re.sub(r":(?:class|func|data|mod|meth|attr):(<code>)~?", r"\1", html)
    return re.sub(
        r"<t([dh])\b.*?</t\1>", lambda cell: with_breaks(cell[0]), html, flags=re.DOTALL
    )


def with_breaks(cell: str) -> str:
    """Let the code in a table's ``cell`` break between the parts of paths, names and settings."""

    def broken(code: re.Match[str]) -> str:
        text = OPTIONS.sub(r'<span class="whole">\g<0></span>', code[0])
        # within the tag there is nothing to break
        return "".join(
            part if part.startswith("<") else ENDS.sub(r"\1<wbr>", part)
            for part in re.split(r"(<[^>]*>)", text)
        )

    return re.sub(r"(?<=<code>)[^<]*(?=</code>)", broken, cell)
