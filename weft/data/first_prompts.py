"""The first questions or words of the user's own data, which a trained model is asked at the end of a run."""

from collections.abc import Iterator
from itertools import islice

from weft.data.chat.pairs import AnswerPair
from weft.data.chat.samples import read_samples
from weft.data.corpora import read_documents
from weft.recipe import CONVERSATIONS, Source

#: So many prompts are chosen, from so many records at the beginning of a source.
COUNT, FIRST = 2, 16
#: Characters of a question at most, and words of a text.
LONGEST, WORDS = 400, 5


def first_prompts(source: Source) -> tuple[str, ...]:
    """Return the first two short prompts of ``source``, as examples for a trained model to continue.

    They are users' first questions in conversations, or the first words of texts. A source without questions or texts,
    such as one of token ids, has none.
    """
    if source.kind == "tokens":
        return ()
    reads = _questions if source.kind in CONVERSATIONS else _beginnings
    prompts = dict.fromkeys(islice(reads(source), FIRST))
    short = [prompt for prompt in prompts if len(prompt) <= LONGEST]
    return tuple(short[:COUNT])


def _questions(source: Source) -> Iterator[str]:
    for _, sample in read_samples(source):
        talk = sample.chosen if isinstance(sample, AnswerPair) else sample
        asked = (m["content"] for m in talk.messages if m["role"] == "user")
        content = next(asked, None) or ""
        parts = content if isinstance(content, list) else [{"text": content}]
        if question := "".join(part["text"] for part in parts).strip():
            yield question


def _beginnings(source: Source) -> Iterator[str]:
    for text in read_documents(source):
        if words := " ".join(text[: 2 * LONGEST].split()[:WORDS]):
            yield words
