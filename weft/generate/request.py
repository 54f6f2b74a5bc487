"""A request: the growing text, the scheduler's data about it, and its sampling settings."""

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from math import isnan
from time import monotonic
from typing import NamedTuple

import torch

from weft.errors import WeftError
from weft.generate.block_source import Contents
from weft.generate.grammar import Grammar
from weft.generate.random_numbers import TokenNumbers
from weft.generate.row_sampling import TextState, row_log_probabilities
from weft.generate.sampling import Sampling
from weft.generate.token_counts import TokenCounts
from weft.generate.workflow import Workflow

T = torch.Tensor

#: Error line of a text for which the model computes no probabilities.
NOT_NUMBERS = "the model's logits for this text are not numbers (NaN or infinity); its weights may be damaged"

#: Beginning of the error line of a text that its form ends.
TOO_COMPLEX = "the text's form has become too complex; ask for a simpler one: "


class Branch(NamedTuple):
    """A draft of a request for which cache blocks have been taken, so that the step computes it. ``path``: the guessed
    tokens behind the request's text. ``table``: numbers of the text's cache blocks, followed by the numbers of the
    blocks for keys and values of ``path``.
    """

    path: Sequence[int]
    table: list[int]


class PrefixView(NamedTuple):
    """The beginning of another ``request``'s text, to which a text attends. ``tokens``: number of its tokens; None:
    all, including those that the other request still adds.
    """

    request: "Request"
    tokens: int | None


class BlockFetch(NamedTuple):
    """Blocks that are being fetched for a request. ``blocks``: future of their contents, which end before the first
    block that could not be read. ``deadline``: time in seconds of ``time.monotonic`` at which the request stops waiting
    and computes the missing tokens.
    """

    blocks: Future[list[Contents]]
    deadline: float


@dataclass(eq=False)
class Request:
    """A text that grows: its token ids, how many of them are computed, and the cache blocks that hold their keys and
    values. The engine makes a request for each answer; the scheduler plans its steps.

    Attributes:
        ``ids``: token ids of the prompt and of what has been written.
        ``most``: largest number of tokens that ``ids`` may reach.
        ``prompt``: number of tokens of the prompt; 0 if nothing depends on it.
        ``adapter``: name of the adapter with which the text is computed; "": the model alone.
        ``tenant``: whose cached prefixes the request may use.
        ``arrival``: number by which requests are ordered; earlier requests have smaller ones.
        ``priority``: requests with a smaller one begin first and lose their cache blocks last.
        ``computed``: number of leading tokens whose keys and values are in the cache.
        ``table``: numbers of the cache blocks of these tokens, in order.
        ``keys``: hash keys by which other requests find the text's cache blocks. The first is the root key
            (:func:`weft.generate.keys.root_key`), from which the rest derive: one key for each full block. Empty before
            the request is started.
        ``shelf``: numbers of the cache blocks that hold the adapter.
        ``hits``: number of the text's first tokens that were in the cache already when the request last began.
        ``drafts``: guessed continuations, to be computed beside the next token.
        ``branches``: those drafts that are computed in the present step.
        ``context``: beginnings of other requests' texts, to which this text attends as well.
        ``offset``: position of the first token.
        ``turned``: whether the texts of ``context`` are attended to as if they stood one after another, directly before
            this text, although each was computed from position 0 on.
        ``scored``: whether the logits behind each token of the prompt are wanted, so that none may come from the cache.
        ``kept``: whether the request keeps its blocks when it ends, as others attend to it.
        ``pinned``: whether the request never gives blocks back, as its tokens depend on others that grow with it.
        ``least_blocks``: number of blocks that must be free here, or can be borrowed, before the request begins again.
        ``fetch``: blocks that are being fetched for the request from outside the cache; None: it waits for none.
        ``logits``: logits behind the last token, ``[vocab]``, if something other than the sampler chooses the tokens.
        ``workflow``: the workflow of which the request is a stage; None: of none.
        ``asked_at``: time of arrival in seconds of ``time.monotonic``.
    """

    ids: list[int]
    most: int  # tokens that it may come to have
    adapter: str = ""
    tenant: str = ""  # whose cached prefixes it may find
    arrival: int = field(default_factory=count().__next__)
    priority: int = (
        0  # the smaller, the earlier it is begun and the later it loses blocks
    )
    prompt: int = 0
    computed: int = 0
    table: list[int] = field(default_factory=list)
    # of its full blocks; the first one is the root
    keys: list[bytes] = field(default_factory=list)
    shelf: list[int] = field(default_factory=list)  # the blocks in which its adapter is
    hits: int = 0  # tokens that were found computed when it last began
    # guesses of what follows, to be computed beside its next token
    drafts: Sequence[Sequence[int]] = ()
    # those of them that are computed in this step
    branches: list[Branch] = field(default_factory=list)
    # others that it attends to, as if they stood before its own tokens
    context: Sequence[PrefixView] = ()
    offset: int = 0  # position of its first token
    # its context counts as one text, though each text in it was computed from position 0 on
    turned: bool = False
    # logits behind each token of its prompt are wanted, so that no token of it may be known
    scored: bool = False
    # others attend to it: when it ends, it keeps its blocks until it is removed
    kept: bool = False
    # never gives blocks back: its tokens depend on others that grew with it
    pinned: bool = False
    # it begins again only once so many blocks are free here or can be borrowed
    least_blocks: int = 0
    fetch: BlockFetch | None = None  # what it waits for
    # [vocab] behind its tokens, of a request that somebody else writes for
    logits: T | None = None
    workflow: Workflow | None = None  # of which it is a stage
    asked_at: float = field(default_factory=monotonic)  # seconds

    @property
    def runs(self) -> bool:
        """Whether the scheduler has started the request, so that it may have cache blocks and be in the next steps."""
        return bool(self.keys)

    @property
    def turn(self) -> tuple[int, int]:
        """Sort key that gives the order in which requests are served: first priority, then arrival; smaller ones go
        first.
        """
        return self.priority, self.arrival

    @property
    def wanted(self) -> int:
        """Number of the text's tokens whose keys and values are not computed yet."""
        return len(self.ids) - self.computed

    @property
    def ready(self) -> bool:
        """Whether the request can be computed: all tokens of other requests to which it attends are computed, and no
        blocks of its own are being fetched.
        """
        return self.fetch is None and all(
            view.request.computed >= (view.tokens or 0) for view in self.context
        )

    def prompt_rows(self, tokens: int) -> int:
        """Return how many rows of logits of the prompt the request needs for scoring from a pass over its next
        ``tokens`` tokens. The row behind the prompt's last token, from which a new token is sampled, is not counted.
        """
        return 0

    @property
    def guessable(self) -> Sequence["Generation"]:
        """Return a list of this text itself if a drafter may guess its next tokens in the next step, otherwise an empty
        list. Callers join the lists of several requests.
        """
        return ()

    def take_prompt(self, first: int, rows: T) -> None:
        """Take the logits that the model computed at tokens of the prompt, to score the prompt.

        ``rows``: logits ``[tokens, vocab]``. Row ``i`` belongs to token ``first + i`` of the prompt, and predicts the
        token after it. By default nothing is done.
        """

    def take(self, rows: T) -> Sequence["Generation"]:
        """Take the logits ``rows`` ``[1 + tokens of branches, vocab]``. The first row is computed at the text's last
        token, and predicts the next one. Then comes one row for each guessed token of the branches.

        Return a list of this text itself if the engine is to sample its next token from the first row, otherwise an
        empty list.
        """
        self.logits = rows[0].cpu()
        return ()


@dataclass(eq=False)
class Generation(Request):
    """A request whose next tokens are sampled from the model's logits.

    Attributes:
        ``how``: settings of sampling.
        ``stops``: token ids that end the text.
        ``resumed``: number of tokens after the prompt that another engine has written.
        ``least``: number of tokens that are written before a stop counts.
        ``top``: number of likeliest tokens whose log-probabilities are kept; 0: only that of the written token; None:
            none.
        ``grammar``: state of the grammar that constrains the text; None: no constraint.
        ``finished``: why the text ended: "stop", "length" or "error" (it could not go on); "" if it goes on.
        ``log_probabilities``: for each written token a pair: its log-probability, and those of the likeliest tokens at
            its place, by id.
        ``prompt_scores``: such a pair for each token of the prompt, from the second one on.
        ``odds``: for each token of its first draft, the probabilities ``[vocab]`` from which a drafter sampled it;
            empty if the draft was not sampled.
        ``chances``: for each written token, the probabilities ``[vocab]`` from which it was sampled; None: they are not
            kept.
        ``siblings``: requests that go on from the same prompt once it is computed.
        ``versions``: which weights have drawn the tokens: pairs of the index of a written token, and of the number of
            the weights from this token on.
        ``failure``: why the text could not go on, as the user reads it; "" if it could.
        ``stopped``: the token id of ``stops`` that ended the text, which is not one of ``ids``; None if none did.
        ``stop_log_probability``: log-probability of ``stopped``, if log-probabilities are kept.
    """

    how: Sampling = field(default_factory=Sampling)
    stops: Collection[int] = ()
    resumed: int = 0  # tokens behind it that another engine has written
    least: int = 0  # tokens before any of its stops
    # log-probabilities of so many likeliest tokens are kept; None: of none, nor the chosen one
    top: int | None = None
    grammar: Grammar | None = None  # what the text may be
    stopped: int | None = None  # which of its stops came
    stop_log_probability: float | None = None
    # "stop" or "length" in the end, or "error" if the text could not go on
    finished: str = ""
    failure: str = ""  # why it could not
    log_probabilities: list[tuple[float, dict[int, float]]] = field(
        default_factory=list
    )
    # from the second token on
    prompt_scores: list[tuple[float, dict[int, float]]] = field(default_factory=list)
    # [vocab] each: the chances with which the first of its drafts was drawn, if it was
    odds: Sequence[T] = ()
    # [vocab] each, with which its tokens were drawn, if they are to be kept
    chances: list[T] | None = None
    # those that go on from the same prompt, once it is read
    siblings: list["Generation"] = field(default_factory=list)
    # index of the first written token, and number of the weights from there on
    versions: list[tuple[int, int]] = field(default_factory=list)
    # of the first `_counted` of its tokens, if penalties need them
    _counts: TokenCounts | None = field(default=None, init=False, repr=False)
    _counted: int = field(default=0, init=False, repr=False)

    @property
    def written(self) -> list[int]:
        """Token ids that were written after the prompt, a new list."""
        return self.ids[self.prompt :]

    @property
    def counted(self) -> TokenCounts | None:
        """Counts of the text's tokens for penalties; None if there are no penalties."""
        if not self.how.penalises:
            return None
        if self._counts is None:
            written = self.ids[self.prompt :]
            self._counts = TokenCounts(self.ids[: self.prompt], written)
        else:
            self._counts.add(self.ids[self._counted :])
        self._counted = len(self.ids)
        return self._counts

    def note_version(self, version: int) -> None:
        """Note that the next token is computed with the weights of the version number ``version``."""
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.ids) - self.prompt, version))

    def state(self) -> TextState:
        """Return all settings and counts on which the choice of the next token depends beside its logits. The random
        number is 0 in it; callers fill it in.
        """
        allowed = self.grammar.mask() if self.grammar else None
        forbidden: Collection[int] = ()
        if len(self.ids) - self.prompt < self.least:
            forbidden = self.stops
        return TextState(self.how, 0.0, self.counted, allowed, forbidden)

    @property
    def numbers(self) -> TokenNumbers:
        """The random numbers of the next token, which depend on the seed and the number of written tokens alone."""
        return TokenNumbers(self.how.seed, len(self.ids) - self.prompt)

    def prompt_rows(self, tokens: int) -> int:
        return (
            min(tokens, self.prompt - 1 - self.computed)
            if self.scored and self.computed < self.prompt - 1
            else 0
        )

    @property
    def guessable(self) -> Sequence["Generation"]:
        # the next step computes only the last token, so that drafts can be checked in the same step
        last = self.wanted == 1 and len(self.ids) < self.most
        return (
            (self,)
            if last and not (self.siblings or self.context or self.finished)
            else ()
        )

    def take_prompt(self, first: int, rows: T) -> None:
        # those that are kept already are those of a request that lost its cache blocks
        rows = rows[len(self.prompt_scores) - first :]
        begin = len(self.prompt_scores) + 1
        tokens = self.ids[begin : begin + len(rows)]
        tops = [self.top or 0] * len(rows)
        scores = row_log_probabilities(rows, tokens, tops)
        self.prompt_scores += scores
        if any(isnan(p) for p, _ in scores):
            self.failure = NOT_NUMBERS

    def take(self, rows: T) -> Sequence["Generation"]:
        if self.finished:  # cancelled meanwhile
            return ()
        siblings, self.siblings = self.siblings, []
        going = [each for each in siblings if not each.finished]
        for each in going:  # their prompt's scores are those of this text
            each.failure = self.failure
        return (self, *going)

    def append(
        self, token: int, said: tuple[float, dict[int, float]] | None
    ) -> "Written":
        """Append the sampled ``token`` and return what was written. If the token is one of the stops, end the text
        instead. ``said``: log-probability of the token, and those of the likeliest tokens by id; None: they are not
        kept.
        """
        ends = token in self.stops
        if ends:
            self.stopped, self.stop_log_probability = token, said and said[0]
            said = None
            if self.grammar and self.grammar.failure:
                return self.fail(TOO_COMPLEX + self.grammar.failure)
            self.finished = "stop"
        else:
            if self.grammar:
                self.grammar.accept(token)
            if said is not None:
                self.log_probabilities.append(said)
            self.ids.append(token)
            if len(self.ids) > self.most:
                self.finished = "length"
        return Written(self, None if ends else token, said, self.finished)

    def fail(self, why: str) -> "Written":
        """End the text, which cannot go on, and return what was written: no token. ``why``: error line for the user."""
        self.failure, self.finished = why, "error"
        return Written(self, None, None, "error")

    @property
    def score(self) -> float:
        """Mean log-probability of the generated tokens, by which the best of several texts is chosen."""
        return sum(p for p, _ in self.log_probabilities) / max(
            1, len(self.log_probabilities)
        )


def check_generations(generations: Iterable[Generation]) -> None:
    """Raise :class:`WeftError` with the error line of the first of ``generations`` that could not go on, if any."""
    for generation in generations:
        if generation.failure:
            raise WeftError(generation.failure)


class Written(NamedTuple):
    """Result of an engine step for one request.

    Attributes:
        ``request``: the request.
        ``token``: its next token; None if the text ended without a further token.
        ``log_probability``: a pair: the log-probability of ``token``, and those of the likeliest tokens at its place,
            by id; None if they were not asked for.
        ``finished``: why the text ended: "stop", "length" or "error"; "" if it goes on.
    """

    request: Generation
    token: int | None
    # of the token, and of the likeliest ones, if asked for
    log_probability: tuple[float, dict[int, float]] | None
    finished: str  # "stop", "length", "error", or "" if it goes on


class WantedRows(NamedTuple):
    """Which rows of logits a forward pass returns for a request: first ``prompt`` rows, then ``drawn`` rows.

    ``first``: index of the first prompt token that has a row. ``prompt``: number of rows that score the prompt's
    tokens. ``drawn``: number of rows from which tokens are sampled.
    """

    request: Request
    first: int
    prompt: int
    drawn: int
