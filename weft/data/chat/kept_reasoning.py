"""Render a conversation with the reasoning of all turns, for templates that keep only that of the last turns.

Each turn is taken from the conversation up to the end of its question, where it is as the model writes it. The text
between turns is that of the whole conversation.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from weft.data.chat.chat_template import ChatTemplate
from weft.data.chat.conversation import Conversation
from weft.data.chat.followed import Followed
from weft.data.chat.learned_spans import WeightedSpan, learned_spans
from weft.data.chat.marks import Marked
from weft.data.chat.question_split import first_messages, questions


class _Piece(NamedTuple):
    """Characters ``start`` to ``end`` of a text, with the turns in it; message ``number``'s turn, or all else."""

    shown: Marked
    turns: Sequence[WeightedSpan]
    start: int
    end: int
    number: int | None


def spans_with_reasoning(
    template: ChatTemplate, talk: Conversation, learned: Sequence[float]
) -> tuple[Followed, list[WeightedSpan]]:
    """Render the conversation ``talk`` with the reasoning of all turns, and find its learned spans.

    Returns the marked text and the spans, as :func:`learned_spans` does. Reasoning that the template never writes is
    left out. ``learned``: loss weight of every message, 0 if it is not learned.
    """
    placed = [
        weight or float(message["role"] == "assistant")
        for weight, message in zip(learned, talk.messages, strict=True)
    ]
    followed, turns = learned_spans(template, talk, placed)
    lost = _without_reasoning(followed)
    kept: list[_Piece] = []
    for question in questions(talk):
        if not lost.intersection(question):
            continue
        part, own = learned_spans(
            template, first_messages(talk, question.stop), placed[: question.stop]
        )
        for number in sorted(lost.intersection(question) - _without_reasoning(part)):
            piece = _turn(part.shown, own, number)
            opening = _opening(followed.shown, _turn(followed.shown, turns, number))
            # a prompt may go on with <think>, which the turn does without where it has no reasoning
            if (whole := _opening(part.shown, piece)).startswith(opening):
                piece = piece._replace(start=piece.start - len(whole) + len(opening))
            kept.append(piece)
    numbers = {piece.number for piece in kept}
    others = [turn for turn in turns if turn.number not in numbers]
    pieces, at = list[_Piece](), 0
    for piece in kept:
        here = _turn(followed.shown, turns, piece.number)
        pieces += [_Piece(followed.shown, others, at, here.start, None), piece]
        at = here.end
    pieces += [_Piece(followed.shown, others, at, len(followed.shown.text), None)]
    shown, turns = _joined(pieces, numbers)
    spans = [
        turn._replace(weight=turn.weight if learned[turn.number] else 0.0)
        for turn in turns
    ]
    return replace(followed, shown=shown), [span for span in spans if span.weight]


def _without_reasoning(followed: Followed) -> set[int]:
    return {number for number, part in followed.left_out() if part == "reasoning"}


def _turn(shown: Marked, turns: Sequence[WeightedSpan], number: int | None) -> _Piece:
    """Return the turn of message ``number`` in a text."""
    own = [turn for turn in turns if turn.number == number]
    start, end = min(turn.start for turn in own), max(turn.end for turn in own)
    return _Piece(shown, own, start, end, number)


def _opening(shown: Marked, turn: _Piece) -> str:
    """Return the text between the words of other messages and the beginning of a turn."""
    others = [
        word.at
        for word in shown.words
        if word.message != turn.number and word.at <= turn.start
    ]
    return shown.text[max(others, default=0) : turn.start]


def _joined(
    pieces: Sequence[_Piece], replaced: set[int | None]
) -> tuple[Marked, list[WeightedSpan]]:
    """Return the text of all pieces with its marks and turns. Between turns the marks of ``replaced`` messages go."""
    text, words, plain = "", [], set[int]()
    generations, turns = list[tuple[int, int]](), list[WeightedSpan]()
    for shown, own, start, end, number in pieces:
        shift = len(text) - start
        text += shown.text[start:end]
        words += [
            word._replace(at=word.at + shift)
            for word in shown.words
            if start <= word.at <= end
            and (
                word.message not in replaced
                if number is None
                else word.message == number
            )
        ]
        plain |= {at + shift for at in shown.plain if start <= at < end}
        generations += [
            (first + shift, last + shift)
            for first, last in shown.generations
            if start <= first and last <= end
        ]
        turns += [
            turn._replace(start=turn.start + shift, end=turn.end + shift)
            for turn in own
            if start <= turn.start and turn.end <= end
        ]
    return Marked(text, tuple(words), generations, frozenset(plain)), turns
