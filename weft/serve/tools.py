"""Calls of tools as a model's own chat template writes them: found in its text, or the only text that it may write."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from weft.data.chat.template import ChatTemplate, TemplateError
from weft.generate.grammar import BLANKS

#: A call whose words cannot be a template's own.
_NAME, _ARGUMENTS = "weft_example", {"weft_key": "weft_value"}
_WRITTEN = re.compile(r'\{\s*"weft_key"\s*:\s*"weft_value"\s*\}')


class Call(NamedTuple):
    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class CallForm:
    """A call is JSON between ``opening`` and ``closing``, an object in which ``name`` and ``arguments`` are two keys.

    ``before`` and ``behind`` are all that stands around the arguments of a call of ``weft_example``.
    """

    opening: str
    closing: str
    name: str
    arguments: str
    before: str
    behind: str

    def grammar(self, tools: Sequence[dict[str, Any]]) -> str:
        """A text that is one call of one of ``tools``, whose arguments meet its schema, in Lark's notation."""
        ways = []
        for number, tool in enumerate(tools):
            schema = (tool.get("parameters") or {"type": "object"}) | {"x-guidance": {"whitespace_pattern": BLANKS}}
            before, behind = (
                json.dumps(text.replace(_NAME, tool["name"]), ensure_ascii=False) if text else ""
                for text in (self.before, self.behind)
            )
            ways += [
                f"call{number}: {before} arguments{number} {behind}",
                f"arguments{number}: %json {json.dumps(schema)}",
            ]
        return "\n".join([f"start: {' | '.join(f'call{i}' for i in range(len(tools)))}", *ways])

    def read(self, text: str) -> list[Call] | None:
        """The calls that ``text`` consists of; None if it has anything else."""
        between = re.compile(rf"\s*(?:{re.escape(self.closing)})?[\s,;]*(?:{re.escape(self.opening)})?\s*")
        found, decoder, at = list[Call](), json.JSONDecoder(), len(between.match(text)[0])  # type: ignore[index]
        while at < len(text):
            try:
                value, at = decoder.raw_decode(text, at)
            except ValueError:
                return None
            if not isinstance(value, dict) or not isinstance(value.get(self.name), str):
                return None
            found.append(Call(value[self.name], json.dumps(value.get(self.arguments, {}), ensure_ascii=False)))
            at = between.match(text, at).end()  # type: ignore[union-attr]
        return found


def call_form(template: ChatTemplate) -> CallForm | None:
    """How ``template`` writes calls; None if it tells a model of no tools, or writes calls in another way than JSON."""
    tool = {"type": "function", "function": {"name": _NAME, "description": "-", "parameters": {"type": "object"}}}
    call = {"id": "callcall1", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    asked = {"role": "user", "content": "?"}
    try:
        told = template.render([asked], [tool], prompt=True).text
        said = template.render([asked, {"role": "assistant", "content": "", "tool_calls": [call]}], [tool]).text
    except TemplateError:
        return None
    written = said[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(told, said, strict=False))) :]
    arguments = _WRITTEN.search(written)
    if _NAME not in told or arguments is None:
        return None
    for start in (found.start() for found in re.finditer(r"\{", written[: arguments.start() + 1])):
        try:
            value, end = json.JSONDecoder().raw_decode(written, start)
        except ValueError:
            continue
        keys = {str(each): key for key, each in value.items()}
        if {_NAME, str(_ARGUMENTS)} <= keys.keys():
            plain = [template.specials.sub("", text) for text in (written[:start], written[end:])]
            opening, closing = plain[0].lstrip(), plain[1].rstrip()
            before, behind = written[start : arguments.start()], written[arguments.end() : end]
            return CallForm(opening.strip(), closing.strip(), keys[_NAME], keys[str(_ARGUMENTS)],
                            opening + before, behind + closing)  # fmt: skip
    return None


class CallFinder:
    """Text that comes in pieces: what :meth:`add` returns is no call; all from the first that may be one on is kept."""

    def __init__(self, form: CallForm) -> None:
        self.form, self.kept = form, ""
        self._begun = self._found = False

    def add(self, piece: str) -> str:
        self.kept += piece
        if self._found:
            return ""
        if not self.form.opening:  # calls are bare objects: a text is one from its first character on, or none
            text = self.kept.lstrip()
            self._begun, self._found = bool(text) or self._begun, text.startswith("{") and not self._begun
            return "" if self._found or not text else self._release(len(self.kept))
        at = self.kept.find(self.form.opening)
        if at < 0:
            opening = self.form.opening
            held = max((n for n in range(1, len(opening)) if self.kept.endswith(opening[:n])), default=0)
            return self._release(len(self.kept) - held)
        self._found = True
        return self._release(at)

    def _release(self, count: int) -> str:
        text, self.kept = self.kept[:count], self.kept[count:]
        return text

    def end(self) -> tuple[str, list[Call]]:
        """What is left of the text, and the calls."""
        calls = self.form.read(self.kept) if self._found else None
        return ("", calls) if calls else (self.kept, [])
