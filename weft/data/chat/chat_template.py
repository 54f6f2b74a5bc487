"""Chat templates: Jinja text that writes a conversation as one text, rendered as in transformers."""

import json
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.data.chat.calls import CallStyle, find_style
from weft.data.chat.marks import Marked, mark_generated, mark_plain_names, read_marks
from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError, WeftError
from weft.paths import home_path
from weft.recipe.named_templates import TOOL_USE

#: What looks like the name of a special token.
_TOKEN = re.compile(
    r"<\|[^<>|\s]+\|>|<\uff5c[^<>\s]+?\uff5c>|<(?:start|end)_of_turn>|<(?:bos|eos)>|</?s>"
)

#: What no template has itself.
_WORD = "weft_word"


class TemplateError(WeftError):
    """Error of a chat template that cannot write a conversation. The message gives the reason."""


class _Generation(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}``: the text between the tags is the model's to generate."""

    tags = {"generation"}  # noqa: RUF012 (as its base has it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_generated"), [], [], body).set_lineno(
            line
        )

    def _generated(self, caller: Callable[[], str]) -> str:
        return mark_generated(caller())


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, which could lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        values = dict(*given, **kwargs)
        for name in values:
            _refuse_hidden(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_hidden(name)
        super().__setitem__(name, value)


def _refuse_hidden(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace cannot have an attribute {name!r}"
        )


class _Dict:
    """The part of ``dict`` that templates may use."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes what would be markup in a page."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def template_environment(now: datetime | None = None) -> jinja2.Environment:
    """Return a Jinja sandbox that renders chat templates as transformers does.

    ``now``: time for the function ``strftime_now``; None: the time of rendering.
    """
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: (now or datetime.now()).strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return sandbox


class ChatTemplate:
    """Chat template that renders Jinja ``text`` with a tokenizer's special tokens and the user's ``variables``.

    ``now``: time for the date that the template writes. ``control``: whether names of special tokens inside messages
    become these tokens instead of plain text. ``tool_use``: text of a separate template for conversations with tools,
    if there is one. Raises :class:`TemplateError` for invalid Jinja.
    """

    def __init__(
        self,
        text: str,
        tokenizer: Tokenizer,
        variables: Mapping[str, Any] | None = None,
        now: datetime | None = None,
        control: bool = False,
        tool_use: str | None = None,
    ) -> None:
        self.variables = tokenizer.template_tokens | dict(variables or {})
        self.now = now
        self.environment = template_environment(now)
        self.tokenizer, self.source = tokenizer, text
        self.tool_use = (
            None
            if tool_use is None
            else ChatTemplate(tool_use, tokenizer, variables, now, control)
        )
        try:
            self.compiled = self.environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is not valid Jinja: {error.message}, line {error.lineno}"
            ) from None
        #: Whether the template itself says what is generated.
        self.tagged = re.search(r"\{%-?\s*generation\s*-?%\}", text) is not None
        self.specials = _any_of(tokenizer.specials)
        stops = (tokenizer.name_of(token) for token in tokenizer.stops)
        #: The names of the tokens at which generated text ends.
        self.stops = frozenset(name for name in stops if name)
        #: What finds tokens that may end a turn.
        self.ends = _any_of(tokenizer.specials, self.stops)
        # A tokenizer's own template may write such names as plain text (Zephyr's <|user|>); of another it is a mistake.
        own = text in (tokenizer.chat_template, *tokenizer.named_templates.values())
        absent = self._literal_tokens - tokenizer.specials.keys() - self._vocabulary
        self.missing = _any_of(set() if own else absent)
        self.protected = _any_of(
            {} if control else tokenizer.specials,
            self._literal_tokens - self._vocabulary,
        )

    @property
    def writes_date(self) -> bool:
        """Whether the text that the template writes depends on the present date."""
        return "strftime_now" in self.source or (
            self.tool_use is not None and self.tool_use.writes_date
        )

    @property
    def sources(self) -> list[str]:
        """Jinja text of this template, and that of the separate template for tools if there is one."""
        return [self.source, *([self.tool_use.source] if self.tool_use else [])]

    def of(self, tools: Sequence[Mapping[str, Any]] | None) -> "ChatTemplate":
        """Return the template for conversations with these ``tools``: this one, or a separate one for tools."""
        return self.tool_use if tools and self.tool_use else self

    @cached_property
    def _styles(self) -> dict[bool, CallStyle]:
        """How the template takes calls of tools: of messages with a content that is empty, and of those without one."""
        return {
            empty: find_style(
                lambda messages, tools: (
                    self._write([*map(self._with_content, messages)], tools).text
                ),
                empty,
            )
            for empty in (True, False)
        }

    @cached_property
    def _literal_tokens(self) -> set[str]:
        """What looks like special tokens in the template's own text."""
        tree = self.environment.parse(self.source)
        literals = [node.data for node in tree.find_all(nodes.TemplateData)]
        literals += [
            node.value
            for node in tree.find_all(nodes.Const)
            if isinstance(node.value, str)
        ]
        return {name for literal in literals for name in _TOKEN.findall(literal)}

    @cached_property
    def _vocabulary(self) -> set[str]:
        model = self.tokenizer.model
        return (
            set()
            if model is None
            else {
                name
                for name in self._literal_tokens
                if model.token_to_id(name) is not None
            }
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Marked:
        """Render a conversation to text. Returns the text, and the positions of marks that the messages contained.

        Marks are invisible characters that :mod:`weft.data.chat.marks` puts around words. Tool calls are rewritten in
        the form that the template takes. Raises :class:`TemplateError` if the template refuses the conversation, fails,
        or writes special tokens that the tokenizer lacks.

        Arguments:
            ``messages``: the conversation's messages in the form of chat templates.
            ``tools``: the tools that the assistant may call.
            ``prompt``: whether the text ends with the words that begin the assistant's next turn.
            ``variables``: variables for this conversation, beside those of the template.
        """
        template = self.of(tools)
        return template._write(
            [*map(template.adapted, messages)], tools, prompt, variables
        )

    def adapted(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``message`` in the form that the template takes.

        Tool calls are converted to the template's form. Content parts are joined if the template needs a text, and a
        text becomes a part if the template reads nothing else, as those of SmolVLM and LLaVA.
        """
        if message.get("tool_calls"):
            message = self._styles[message.get("content") == ""].adapted(message)
        return self._with_content(message)

    def _with_content(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content, role = message.get("content"), message.get("role")
        needing = self._needing_parts
        joined = not self._takes_parts or (needing and role not in needing)
        if isinstance(content, list) and joined:
            return dict(message) | {"content": "".join(str(p["text"]) for p in content)}
        if isinstance(content, str) and role in needing:
            return dict(message) | {"content": _as_parts(content)}
        return message

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template writes a content that is a list of parts, and not the list as Python or JSON does."""
        return self._reads([{"role": "user", "content": _as_parts(_WORD)}])

    @cached_property
    def _needing_parts(self) -> frozenset[str]:
        """Roles of messages whose content the template writes only if it is a list of parts."""
        if not self._takes_parts or self._reads([{"role": "user", "content": _WORD}]):
            return frozenset()
        asked, needing = {"role": "user", "content": _as_parts(_WORD)}, {"user"}
        for role in ("assistant", "system", "developer", "tool"):
            said = {"role": role, "content": _WORD}
            # in the order that templates expect
            first = role in ("system", "developer")
            if not self._reads([said, asked] if first else [asked, said]):
                needing.add(role)
        return frozenset(needing)

    def _reads(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the template writes the words of each of ``messages``, and no list as Python or JSON does."""
        try:
            written = self._write(messages).text
        except TemplateError:
            return False
        listed = "'type'" in written or '"type"' in written
        return written.count(_WORD) >= len(messages) and not listed

    def _write(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Marked:
        given: dict[str, Any] = dict(variables or {}) | {
            "messages": list(messages),
            "tools": tools,
            "documents": None,
        }
        values = (
            self.variables
            | {"add_generation_prompt": prompt}
            | mark_plain_names(given, self.protected)
        )
        try:
            shown = read_marks(self.compiled.render(values))
        except jinja2.exceptions.SecurityError as error:
            raise TemplateError(
                f"the chat template does what it may not: {error}"
            ) from None
        except Exception as error:  # whatever the template does
            line = next(
                (
                    f.lineno
                    for f in traceback.extract_tb(error.__traceback__)
                    if f.filename == "<template>"
                ),
                None,
            )
            where = f", line {line} of it" if line else ""
            if "tool_calls" not in self.source and any(m.get("tool_calls") for m in messages):  # fmt: skip
                where += (
                    "; it knows no tool calls: set data.chat.template to one that does"
                )
            # What raise_exception says is meant for the reader.
            kind = (
                ""
                if type(error) is jinja2.exceptions.TemplateError
                else f"{type(error).__name__}: "
            )
            raise TemplateError(
                f"the chat template refuses it: {kind}{str(error).strip()}{where}"
            ) from None
        for name in self.missing.finditer(shown.text):
            if name.start() not in shown.plain:
                raise TemplateError(
                    f"the chat template writes {name[0]!r}, which the tokenizer lacks; use the tokenizer that "
                    "belongs to the template, or set data.chat.template"
                )
        return shown


def _as_parts(text: str) -> list[dict[str, str]]:
    """Return ``text`` as the content of a message that is a list of parts."""
    return [{"type": "text", "text": text}]


def template_of(
    tokenizer: Tokenizer,
    variables: Mapping[str, Any] | None = None,
    now: datetime | None = None,
    control: bool = False,
) -> ChatTemplate | None:
    """Return the chat template of ``tokenizer``, or None if the tokenizer has none.

    ``variables``: the user's variables for the template. ``now``: time for the template's date, by default the time of
    rendering. ``control``: whether names of special tokens inside messages become these tokens.
    """
    default, tool_use = tokenizer.chat_template, tokenizer.named_templates.get(TOOL_USE)
    if not default and not tool_use:
        return None
    text = (
        default
        or "{{ raise_exception('the tokenizer has none for conversations without tools') }}"
    )
    return ChatTemplate(text, tokenizer, variables, now, control, tool_use)


def template_text(given: str, name: str) -> str:
    """Return the text of a chat template: ``given`` itself, or the contents of the file with the path ``given``.

    ``name``: name of the template in errors. Raises :class:`UsageError` for a file that cannot be read or is empty, and
    for invalid Jinja.
    """
    text, where = given, ""
    if "{" not in given:
        file = home_path(given)
        try:
            text, where = file.read_text(encoding="utf-8"), f"{file} "
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"{name}: cannot read {file}: {reason}; give a file or a template"
            ) from None
    if not text.strip():
        raise UsageError(f"{name}: {where}is empty; give a template of Jinja text")
    try:
        template_environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(
            f"{name}: {where}is not valid Jinja: {error.message}, line {error.lineno}"
        ) from None
    return text


def _any_of(*names: Iterable[str]) -> re.Pattern[str]:
    """What finds the longest of ``names`` at a place, in a time that does not grow with their number."""
    tree: dict[str, Any] = {}
    for name in (name for some in names for name in some):
        node = tree
        for char in name:
            node = node.setdefault(char, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        ways = "|".join(
            re.escape(char) + pattern(below) for char, below in node.items() if char
        )
        return f"(?:{ways})?" if ways and "" in node else f"(?:{ways})" if ways else ""

    return re.compile(pattern(tree) or "(?!)")
