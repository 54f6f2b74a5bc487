"""Encode conversations as tokens, each with its weight in the loss, and prompts for a model to continue."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from weft.data.chat.chat_template import ChatTemplate, TemplateError, template_of
from weft.data.chat.conversation import Conversation, as_messages
from weft.data.chat.followed import Followed
from weft.data.chat.kept_reasoning import spans_with_reasoning
from weft.data.chat.learned_spans import WeightedSpan, learned_spans
from weft.data.chat.marks import Marked
from weft.data.chat.notes import Facts, facts_of
from weft.data.chat.question_split import split_at_questions
from weft.data.chat.reasoning import (
    THINKS,
    Thoughts,
    begins_thinking,
    thoughts_of,
    without_reasoning,
)
from weft.data.json_text import parse_json
from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError, WeftError

Messages = list[dict[str, Any]]

#: Stands for a special token that the template has written; U+FDD5 to U+FDDF are never text either.
_TOKEN, _TOKEN_END = "\ufdd5", "\ufdd6"


class Encoded(NamedTuple):
    """Encoded conversation: token ``ids`` int64 ``[tokens]`` and their loss ``weights`` float32 ``[tokens]``.

    Token ``i`` covers the characters ``starts[i]:ends[i]`` of the rendered ``text``. ``spans``: the learned spans of
    the text. ``followed``: the text with marks that show where the words of each message are.
    """

    text: str
    ids: np.ndarray
    weights: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    spans: tuple[WeightedSpan, ...]
    followed: Followed

    @property
    def facts(self) -> Facts:
        """Facts to report about the conversation: what the template left out, and whether a stop id is learned.

        A stop id is the id of a token at which generation ends.
        """
        whole = any(span.number < 0 for span in self.spans)
        numbers = (
            range(len(self.followed.talk.messages))
            if whole
            else {span.number for span in self.spans}
        )
        last = 0 if whole else max((span.start for span in self.spans), default=0)
        learned = self.weights > 0
        ending = self.ids[learned & (self.ends > last)]
        return facts_of(self.followed, self.ids[learned], ending, numbers)


class ChatEncoder:
    """Encoder that converts conversations to token ids by the chat template ``template``.

    ``learn``: which tokens are learned: "assistant", "last" (only the assistant's last turn), "all" (every token), or a
    list of roles. ``reasoning``: what happens if the template drops the reasoning of earlier turns. With "split" a
    conversation becomes several samples, so that the reasoning stays. With "keep" the reasoning is put back where the
    template has dropped it. With "template" it stays dropped.
    """

    def __init__(
        self,
        template: ChatTemplate,
        learn: str | Sequence[str] = "assistant",
        reasoning: str = "template",
    ) -> None:
        self.template, self.learn, self.reasoning = template, learn, reasoning
        self.tokens = _TemplateTokens(template)

    def samples(self, talk: Conversation) -> list[Conversation]:
        """Split a conversation into samples, so that each learned turn is learned in exactly one of them.

        The whole conversation is the only sample, unless the encoder's ``reasoning`` is "split" and its ``learn`` is
        not "all". With "split", a learned turn whose reasoning the template would drop in the whole conversation gets a
        shorter sample. This sample ends with that turn, so that the reasoning stays. Raises :class:`TemplateError` if
        the template refuses the conversation.
        """
        if self.reasoning != "split" or self.learn == "all":
            return [talk]
        return split_at_questions(
            self.template.of(talk.tools), talk, talk.learned(self.learn)
        )

    def encode(self, talk: Conversation) -> Encoded:
        """Return the conversation ``talk`` as token ids with their loss weights. Raises :class:`TemplateError` if the
        template refuses it, or leaves out all that is learned.
        """
        find = spans_with_reasoning if self.reasoning == "keep" else learned_spans
        template = self.template.of(talk.tools)
        if self.learn == "all":
            masks = dict(talk.masks)  # of the data's own, which count here too
            numbers = range(len(talk.messages))
            followed, turns = find(template, talk, [float(i in masks) for i in numbers])
            spans = [WeightedSpan(0, len(followed.shown.text), talk.weight, -1)]
            spans += [
                turn._replace(weight=talk.weight * masks[turn.number]) for turn in turns
            ]
        else:
            followed, spans = find(template, talk, talk.learned(self.learn))
        shown = followed.shown
        ids, starts, ends = self.tokens.encode(shown)
        weights = np.zeros(len(ids), np.float32)
        for span in spans:
            weights[(starts < span.end) & (ends > span.start)] = span.weight
        # of data that learn nothing of it, no template is to blame
        if any(talk.learned(self.learn)) and not weights.any():
            raise TemplateError(
                f"the chat template writes nothing of what is learned (data.chat.learn = {self.learn!r})"
            )
        return Encoded(shown.text, ids, weights, starts, ends, tuple(spans), followed)

    def prompt(
        self,
        talk: Sequence[dict[str, object]],
        tools: Sequence[dict[str, object]] | None = None,
    ) -> np.ndarray:
        """Return the token ids of the messages ``talk``, rendered up to the start of the assistant's answer.

        ``tools``: tools that the assistant may call.
        """
        return self.tokens.encode(self.template.render(talk, tools, prompt=True))[0]


def read_messages(text: str) -> tuple[Messages, Messages | None]:
    """Return the messages and the tools in the JSON ``text``: a list of messages, or an object with ``messages`` and
    ``tools``.

    Tools are None if the text has none. Raises :class:`UsageError` if the text is neither.
    """
    try:
        parsed = parse_json(text)
    except ValueError as error:
        raise UsageError(f"the conversation is not JSON: {error}") from None
    messages, tools = (
        (parsed.get("messages"), parsed.get("tools"))
        if isinstance(parsed, dict)
        else (parsed, None)
    )
    if not isinstance(messages, list) or not messages:
        raise UsageError(
            "the conversation has no messages; give a list of objects with 'role' and 'content'"
        )
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UsageError(
                f"message {number} of the conversation is no object with 'role' and 'content'"
            )
    return messages, tools


def prompt_ids(
    tokenizer: Tokenizer,
    prompt: str | Messages,
    chat: bool,
    name: str,
    tools: Messages | None = None,
) -> list[int]:
    """Return the token ids of a prompt that a model is to continue.

    ``chat``: whether ``prompt`` is rendered by the chat template. If so, it is a conversation, or a text that becomes
    the user's message, and the ids end where the assistant's answer begins. If not, ``prompt`` is a plain text.
    ``name``: name of the model in errors. ``tools``: tools that the assistant may call.
    """
    if not chat:
        assert isinstance(prompt, str)
        return tokenizer.prompt_ids(prompt)
    return [
        int(i) for i in own_encoder(tokenizer, name).prompt(as_messages(prompt), tools)
    ]


class ReasoningPrompt(NamedTuple):
    """The token ids of a conversation to be continued, and the tags around the reasoning with which the answer may
    begin.

    ``thoughts``: the tags; None if the prompt ends with a closed reasoning block, or the template has no reasoning.
    """

    ids: list[int]
    thoughts: Thoughts | None


def reasoning_prompt(
    tokenizer: Tokenizer,
    talk: Messages,
    think: bool | None,
    name: str,
    tools: Messages | None = None,
) -> ReasoningPrompt:
    """Return the token ids of the conversation ``talk`` up to the assistant's answer, and the tags of reasoning.

    ``think``: True: the answer begins with reasoning. False: the prompt ends with a closed, empty block of reasoning.
    None: the prompt ends as the template writes it. A template that reads the variable ``enable_thinking`` gets
    ``think`` as its value. ``name``: name of the model in errors. ``tools``: tools that the assistant may call. Raises
    :class:`UsageError` for templates without reasoning, unless ``think`` is None.
    """
    encoder = own_encoder(tokenizer, name)
    template = encoder.template.of(tools)
    thoughts = thoughts_of(template.source)
    if thoughts is None and think is not None:
        raise UsageError(
            f"the chat template of {name} knows no reasoning, such as <think>; leave out --think"
        )
    reads = think is not None and THINKS in template.source
    variables = {THINKS: think} if reads else {}
    shown = template.render(as_messages(talk), tools, True, variables)
    if thoughts and think is False:
        text = without_reasoning(thoughts, template.source, shown.text)
        shown, thoughts = replace(shown, text=text), None
    if thoughts:
        thoughts = thoughts._replace(begun=begins_thinking(thoughts, shown.text))
    return ReasoningPrompt([int(i) for i in encoder.tokens.encode(shown)[0]], thoughts)


def own_encoder(
    tokenizer: Tokenizer, name: str, learn: str = "assistant"
) -> ChatEncoder:
    """Return an encoder that uses the tokenizer's own chat template.

    ``name``: name of the model in errors. ``learn``: which tokens are learned: "assistant" (the assistant's turns),
    "last" (only its last turn) or "all".
    """
    template = template_of(tokenizer)
    if template is None:
        raise WeftError(
            f"{name} has no chat template; do without chat, or give a model that was trained to chat"
        )
    return ChatEncoder(template, learn)


class _PlacedTokens(NamedTuple):
    """Ids of a text, and where in it each token begins and ends: int64 ``[tokens]`` each."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class _TemplateTokens:
    """Encodes a rendered text: special tokens are those that the template has written, not equal text in messages.

    A copy of the tokenizer knows the former by aliases, and takes their usual names for text.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.tokenizer, self.names = template.tokenizer, template.specials
        self.aliases: dict[str, str] = {}  # of those that a text has held so far
        self.ids: dict[int, int] = {}  # of a special token by that of its alias
        # of aliases that take the white space around them along
        self.swallowing: set[int] = set()

    @cached_property
    def model(self) -> tokenizers.Tokenizer:
        assert self.tokenizer.model is not None
        copy = tokenizers.Tokenizer.from_str(self.tokenizer.model.to_str())
        copy.encode_special_tokens = True
        return copy

    def alias(self, name: str) -> str:
        """Return the text that stands for the special token ``name`` in :attr:`model`."""
        if name not in self.aliases:
            digits = "".join(
                chr(0xFDE0 + int(digit, 16)) for digit in f"{len(self.aliases):x}"
            )
            self.aliases[name] = f"{_TOKEN}{digits}{_TOKEN_END}"
            like = self.model.get_added_tokens_decoder()[self.tokenizer.specials[name]]
            flags = {
                "single_word": like.single_word,
                "lstrip": like.lstrip,
                "rstrip": like.rstrip,
            }
            self.model.add_tokens(
                [tokenizers.AddedToken(self.aliases[name], normalized=False, **flags)]
            )
            added = self.model.token_to_id(self.aliases[name])
            assert added is not None
            self.ids[added] = self.tokenizer.specials[name]
            if like.lstrip or like.rstrip:
                self.swallowing.add(added)
        return self.aliases[name]

    def encode(self, shown: Marked) -> _PlacedTokens:
        own = [
            special
            for special in self.names.finditer(shown.text)
            if special.start() not in shown.plain
        ]
        if self.tokenizer.model is None:
            return self._bytes(shown.text, own)
        pieces, at, length = [], 0, 0
        # where each alias ends, and from there on the way from its text to the real one
        ends, shifts = [], [0]
        for special in own:
            pieces += [shown.text[at : special.start()], self.alias(special[0])]
            at, length = special.end(), length + len(pieces[-2]) + len(pieces[-1])
            ends.append(length)
            shifts.append(at - length)
        encoded = self.model.encode(
            "".join([*pieces, shown.text[at:]]), add_special_tokens=False
        )
        places = np.array(encoded.offsets, np.int64).reshape(-1, 2)
        places += np.array(shifts)[np.searchsorted(ends, places, side="right")]
        # A token that swallows the white space around its name is where its name is: what is learned may begin in that.
        for i in np.flatnonzero(np.isin(encoded.ids, [*self.swallowing])):
            start, end = places[i]
            text = shown.text[start:end]
            places[i] = end - len(text.lstrip()), start + len(text.rstrip())
        return _PlacedTokens(
            np.array([self.ids.get(i, i) for i in encoded.ids], np.int64),
            places[:, 0],
            places[:, 1],
        )

    def _bytes(self, text: str, own: Sequence[re.Match[str]]) -> _PlacedTokens:
        """Return the same for a tokenizer of bytes: a token per byte, and one for each special token."""
        ids: list[int] = []
        starts: list[int] = []
        ends: list[int] = []
        at = 0
        for special in [*own, None]:
            for place, char in enumerate(text[at : special and special.start()], at):
                data = char.encode()
                ids += data
                starts += [place] * len(data)
                ends += [place + 1] * len(data)
            if special is not None:
                at = special.end()
                ids.append(self.tokenizer.specials[special[0]])
                starts.append(special.start())
                ends.append(at)
        return _PlacedTokens(
            *(np.array(each, np.int64) for each in (ids, starts, ends))
        )
