"""Constrains a text by a JSON schema, a regular expression or a grammar, which determine the allowed next tokens.

The automaton is llguidance's (Earley's algorithm over derivatives of regular expressions, and a trie of the tokens),
from ``pip install 'weft[serve]'``; here it becomes a mask over a model's logits. A text's grammar advances only by
tokens that the sampler has chosen, so that wrong guesses need not be undone.
"""

from collections.abc import Sequence
from time import thread_time
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError

#: How the text of a grammar is written.
Kind = Literal["json", "regex", "lark"]

#: The blanks that may stand between two tokens of JSON: few, as a confused model would write them for ever.
BLANKS = r"[\x20\x0A\x0D\x09]{1,40}"

#: Seconds of processor time that a grammar may take, and more for each token. Ambiguous grammars get slower with every
#: token, while all other requests wait.
FIRST, EACH = 0.3, 0.002


class GrammarSource(NamedTuple):
    """The text from which a grammar was compiled, so that another process can compile the same grammar. ``kind``:
    whether ``text`` is a JSON schema, a regular expression or a grammar in Lark's notation.
    """

    kind: Kind
    text: str | dict[str, Any]


class Grammar:
    """State of a grammar in one text: it says which tokens may come next. ``matcher``: the grammar's state in the
    library llguidance. ``vocab``: number of token ids of the model. ``ends``: ids that end the text; they are allowed
    only where the text is complete by the grammar. ``source``: text from which the grammar was compiled. ``left``:
    seconds of computing time that the grammar may still take for this text.
    """

    def __init__(
        self,
        matcher: Any,
        vocab: int,
        ends: tuple[int, ...],
        source: GrammarSource,
        left: float = FIRST,
    ) -> None:
        self._matcher, self._vocab, self.ends = matcher, vocab, ends
        self.source = source
        self._left = left  # seconds that are not used yet

    def mask(self) -> torch.Tensor:
        """Return which token ids the grammar allows next, bool ``[vocab]``. Ids without a token in the tokenizer are
        False.
        """
        if self._left < 0:
            return torch.zeros(self._vocab, dtype=torch.bool).index_fill(
                0, torch.tensor(self.ends), True
            )
        began = thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._left += EACH - (thread_time() - began)
        return torch.from_numpy(
            np.unpackbits(bits, count=self._vocab, bitorder="little")
        ).view(torch.bool)

    def accept(self, i: int) -> bool:
        """Advance by the token ``i``, which must not end the text. Return False, and change nothing, if the grammar
        does not allow the token.
        """
        began = thread_time()
        accepted = self._left >= 0 and bool(self._matcher.try_consume_tokens([i]))
        self._left -= thread_time() - began
        return accepted

    def resume(self, written: Sequence[int]) -> bool:
        """Advance by the tokens ``written``, which are the beginning of a text. Return False if the grammar does not
        allow them.

        These tokens count towards the limit of computing time for a text as they did when they were written.
        """
        began = thread_time()
        accepted = int(self._matcher.try_consume_tokens(list(written)))
        self._left += EACH * len(written) - (thread_time() - began)
        return accepted == len(written)

    def copy(self) -> "Grammar":
        """Return an independent grammar in the same state, for a second text that goes on from the same tokens."""
        return Grammar(
            self._matcher.deep_copy(), self._vocab, self.ends, self.source, self._left
        )

    @property
    def failure(self) -> str:
        """Error message if the grammar cannot go on in this text, because it has used up its computing time or has
        become too complex; "" otherwise.
        """
        said = (
            "it takes too much time"
            if self._left < 0
            else str(self._matcher.get_error())
        )
        return said.split("\n")[0]


class Grammars:
    """Compiles grammars over the tokens of ``tokenizer``, for a model with ``vocab`` ids. Making the compiler takes a
    second.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        try:
            import llguidance
        except ImportError:
            raise UsageError(
                "grammars need the package llguidance: pip install 'weft[serve]'"
            ) from None
        if not tokenizer.stops:
            raise UsageError(
                "a text with a form ends where it is complete, and this model has no end token"
            )
        self._matcher, self._vocab, self._ends = (
            llguidance.LLMatcher,
            vocab,
            tokenizer.stops,
        )
        model = (
            tokenizer.model.to_str()
            if tokenizer.model
            else llguidance.TokenizerWrapper(_Bytes(tokenizer.closing))
        )
        try:
            self._tokens = llguidance.LLTokenizer(
                model, max(vocab, tokenizer.vocab), list(self._ends)
            )
        except Exception as error:  # the library raises nothing narrower
            raise UsageError(
                f"no grammars for this tokenizer: {str(error).splitlines()[0]}"
            ) from None

    def compile(self, kind: Kind, text: str | dict[str, Any]) -> Grammar:
        """Compile ``text`` to a grammar, and return it in the state before the first token. ``kind``: the text is a
        JSON schema, a regular expression or a grammar in Lark's notation.

        Takes milliseconds to a second, without the interpreter's lock. Raises :class:`UsageError` for a text that
        cannot be read, or that nothing can match.
        """
        try:
            if kind == "json":
                source = self._matcher.grammar_from_json_schema(
                    text, overrides={"whitespace_pattern": BLANKS}
                )
            else:
                source = getattr(self._matcher, f"grammar_from_{kind}")(text)
        except (ValueError, TypeError) as error:
            raise UsageError(f"the {kind} grammar cannot be read: {error}") from None
        grammar = Grammar(
            self._matcher(self._tokens, source, log_level=0),
            self._vocab,
            self._ends,
            GrammarSource(kind, text),
        )
        possible = grammar.mask().any()
        if grammar.failure or not possible:
            raise UsageError(
                f"the {kind} grammar cannot be met: {grammar.failure or 'no token can begin it'}"
            )
        return grammar


class _Bytes:
    """The tokenizer of bytes, with the interface that llguidance expects."""

    bos_token_id = None

    def __init__(self, eos: int) -> None:
        self.eos_token_id, self.special_token_ids = eos, [eos]
        self.tokens = [*(bytes([i]) for i in range(256)), b"<|endoftext|>"]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
