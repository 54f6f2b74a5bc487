"""Checks the length of requests before any work whose time grows with their length."""

from typing import NamedTuple

import numpy as np

from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError
from weft.serve.protocol import Refusal

#: Objects, lists and keys of a request at most, and values: reading more keeps everybody waiting.
LARGEST_TREE, LARGEST_LIST = 2**15, 2**20

#: Characters of a text that are tokenized at a time to find out whether it is too long.
PIECE = 2**15

_QUOTE = ord('"')


def check_tree(body: bytes) -> None:
    """Raise :class:`Refusal` for a JSON body with so many objects, lists, keys or values that parsing it would take too
    long.
    """
    branches, commas = (
        sum(body.count(sign) for sign in (b"{", b"[", b":")),
        body.count(b","),
    )
    if branches <= LARGEST_TREE and commas <= LARGEST_LIST:
        return
    signs = outside_strings(body)
    branches, commas = (
        int(np.isin(signs, list(group)).sum()) for group in (b"{[:", b",")
    )
    if branches > LARGEST_TREE or commas > LARGEST_LIST:
        said = f"{LARGEST_TREE:,} objects, lists and keys and {LARGEST_LIST:,} values"
        raise Refusal(
            413,
            f"the request has {branches:,} objects, lists and keys and {commas:,} values; give {said}",
        )


def outside_strings(body: bytes) -> np.ndarray:
    """Return those bytes of the JSON text ``body`` that are outside its string literals, as a uint8 array."""
    plain = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    inside = np.cumsum(plain == _QUOTE, dtype=np.int32) & 1
    return plain[inside == 0]


class TokenLimit(NamedTuple):
    """Largest number of tokens of a text. ``tokens``: the number. ``whose``: cause of the limit for an error line, such
    as "the cache" or "the model's context".
    """

    tokens: int
    whose: str  # "the model's context"


class TooManyTokens(UsageError):
    """Error for a text of at least ``tokens`` tokens, which is more than ``limit`` allows. ``beside``: phrase that
    follows the number in the error line and says what else takes tokens, such as the answer; empty: nothing else.
    """

    def __init__(self, tokens: int, limit: TokenLimit, beside: str = "") -> None:
        said = (
            f"{tokens:,} tokens{beside} are more than {limit.whose} of {limit.tokens:,}"
        )
        super().__init__(
            f"{said}; shorten the text{' or ask for fewer tokens' if beside else ''}"
        )

    def refusal(self, field: str) -> Refusal:
        """Return the error for a client whose text in ``field`` is too long, with the error code that clients of
        OpenAI's API know.
        """
        return Refusal(400, f"{field}: {self}", "context_length_exceeded", field)


class TextLengths:
    """Checks whether texts have too many tokens for a limit. A long text is tokenized in pieces, and no further than
    needed to know that it is too long.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        words = (
            []
            if tokenizer.model is None
            else tokenizer.model.get_vocab(with_added_tokens=True)
        )
        # Where a text is cut, one token of the whole may become as many as it has characters.
        self.slack = max(map(len, words), default=0)

    def check(self, text: str, limit: TokenLimit) -> None:
        """Raise :class:`TooManyTokens` if ``text`` certainly has more tokens than ``limit`` allows. Short texts are not
        checked.
        """
        if (
            len(text) > PIECE
            and (count := self.at_least(text, limit.tokens)) > limit.tokens
        ):
            raise TooManyTokens(count, limit)

    def at_least(self, text: str, enough: int) -> int:
        """Return a lower bound of the number of tokens of ``text``. Tokenizing stops as soon as the bound is above
        ``enough``.
        """
        count = 0
        for at in range(0, len(text), PIECE):
            count += max(
                0,
                len(self.tokenizer.encode(text[at : at + PIECE], special=True))
                - self.slack,
            )
            if count > enough:
                break
        return count
