"""Chat templates of a tokenizer that has several: a default one, one for conversations with tools, others by name.

They stand in ``tokenizer_config.json`` as a list of ``name`` and ``template``, or in files of their own: the default
one in ``chat_template.jinja``, others in a folder. Where there are files, the list does not count.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.errors import WeftError

#: Where a chat template stands by itself, beside ``tokenizer.json``, and where those with other names do.
TEMPLATE_FILE, NAMED_FOLDER = "chat_template.jinja", "additional_chat_templates"
CONFIG_FILE = "tokenizer_config.json"
#: The template without a name, and the one for conversations with tools.
DEFAULT, TOOL_USE = "default", "tool_use"


def with_named_templates(files: Mapping[str, bytes], folder: Path) -> dict[str, bytes]:
    """Return the files of a tokenizer with all of its named chat templates in ``tokenizer_config.json``.

    ``files``: contents of the files in ``folder`` by name. The templates come from a subfolder of ``folder``.
    Afterwards a tokenizer is complete without subfolders, so that every checkpoint can hold it. Raises
    :class:`WeftError` if a file cannot be read.
    """
    named = sorted((folder / NAMED_FOLDER).glob("*.jinja"))
    if not named:
        return dict(files)
    try:
        texts = {file.stem: file.read_text(encoding="utf-8") for file in named}
        if TEMPLATE_FILE in files:
            texts = {DEFAULT: files[TEMPLATE_FILE].decode()} | texts
        config = json.loads(files.get(CONFIG_FILE, b"{}")) | {
            "chat_template": listed(texts)
        }
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeftError(
            f"the chat templates in {folder} cannot be read: {reason}; download the model again"
        ) from None
    rest = {name: content for name, content in files.items() if name != TEMPLATE_FILE}
    return rest | {
        CONFIG_FILE: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    }


def listed(templates: Mapping[str, str]) -> list[dict[str, str]]:
    """Return chat templates in the form of ``tokenizer_config.json``: a list of dictionaries with ``name`` and
    ``template``.

    ``templates``: the texts of the templates by name.
    """
    return [{"name": name, "template": text} for name, text in templates.items()]


def templates_of(config: Mapping[str, Any], file: bytes | None) -> dict[str, str]:
    """Return the chat templates of a tokenizer by name.

    ``file``: content of a template file; None: the templates are in ``config`` instead. ``config``: the parsed
    ``tokenizer_config.json``.
    """
    given = config.get("chat_template")
    if file is not None:
        return {DEFAULT: file.decode()}
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}
    if isinstance(given, dict):
        return dict(given)
    return {DEFAULT: given} if given else {}
