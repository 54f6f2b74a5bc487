"""Generation for many requests at once (continuous batching).

In each step the scheduler chooses which tokens of which requests are computed, one forward pass computes them, and
samplers choose the next tokens. A request gets the same tokens as if it were alone, whatever the budget, the policy,
the size of the cache and the other requests are. Model, cache and steps can be cut over several ranks
(:mod:`weft.generate.leader`).
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from time import sleep
from typing import NamedTuple, Protocol

import torch

from weft.errors import UsageError, WeftError
from weft.generate import branches
from weft.generate.block_contents import LayerPart
from weft.generate.block_pool import BlockPool
from weft.generate.block_source import SourceUsage
from weft.generate.cache_policy import NONE, CachePolicy, check_policy
from weft.generate.drafter import Drafter, early_exit
from weft.generate.early_exit import check_early_layer
from weft.generate.grammar import Grammar
from weft.generate.keys import shelf_keys
from weft.generate.leader import Leader
from weft.generate.policies import Policy, exact_fill
from weft.generate.reader import PagedReader
from weft.generate.request import Generation, Request, WantedRows, Written
from weft.generate.sampled_text import SampledText, write_next_tokens
from weft.generate.sampling import Sampling
from weft.generate.scheduler import ScheduledStep, Scheduler
from weft.generate.step_curve import StepWatch
from weft.generate.workflow import Workflow
from weft.models.attention_backend import check_attention
from weft.models.borrowed_keys import BlockLender, LenderLost
from weft.models.invariant_kernels import check_invariant
from weft.models.lean_block import make_lean
from weft.models.linear_attention import CHUNK
from weft.models.row_adapters import HostAdapter
from weft.models.shared_weights import check_same_shape
from weft.models.transformer import Transformer

#: Tokens of a cache block; more where layers keep a recurrent state per block, which takes the memory of many keys.
BLOCK = 16

#: Tokens of a step: so many that it is bound by compute, and not by reading the weights.
BUDGET = 512

#: Seconds between two looks at requests that wait for cache blocks, if there is nothing else to do.
LOOK_S = 0.002

#: By how much earlier than all others a text counts that another engine has begun.
AHEAD = 1 << 48


class LaunchedPass(NamedTuple):
    """A forward pass that was launched and whose results have not been taken yet. ``drawn``: the requests that get a
    token from the pass, each with the number of its tokens that the pass computes. ``rows``: number of rows of logits
    of each request that wants some, in the order of the logits. ``logits``: function that waits for the logits ``[rows,
    vocab]`` and returns them. ``version``: version of the weights that the pass uses.
    """

    drawn: ScheduledStep
    rows: list[WantedRows]
    logits: Callable[[], torch.Tensor]
    version: int


class LoanUsage(NamedTuple):
    """Numbers of cache blocks in loans. A loan is a group of cache blocks of one engine's text that another engine, or
    a file, holds.

    ``borrowed``: blocks of other engines that hold this engine's texts. ``lent``: blocks of this engine that hold other
    engines' texts. ``offered``: free blocks that this engine keeps for loans.
    """

    borrowed: int = 0
    lent: int = 0
    offered: int = 0


class LoanParty(Protocol):
    """Interface of an object that lends an engine's free cache blocks to other engines, or borrows their blocks for
    this engine's texts. A loan is a group of blocks that were lent together.
    """

    def settle(self) -> None:
        """Offer free blocks to other engines, or end loans that are no longer needed. The engine calls this between two
        steps.
        """

    def give_up(self, lender: BlockLender) -> None:
        """Compute again all texts that have blocks at ``lender``, because ``lender`` can no longer be reached."""

    def usage(self) -> LoanUsage:
        """Return how many cache blocks are in loans. May be called in any thread."""

    def close(self) -> None:
        """End processes that were started to hold cache blocks of this engine, such as owners of files."""


def check_prompt(model: Transformer, ids: Sequence[int]) -> None:
    """Raise :class:`UsageError` if ``model`` does not write texts (a reward model or a model of images), or cannot read
    the prompt ``ids``.
    """
    if model.shape.kind == "diffusion":
        raise UsageError(
            "this model makes images and writes no texts; ask it with weft sample --checkpoint"
        )
    if model.shape.output == "score":
        raise UsageError(
            "this is a reward model, which scores texts and writes none; give one that writes"
        )
    check_ids(ids, model.shape.vocab)


def check_ids(ids: Sequence[int], vocab: int) -> None:
    """Raise :class:`UsageError` if a model of ``vocab`` token ids cannot read the prompt ``ids``."""
    if not ids or min(ids) < 0 or max(ids) >= vocab:
        raise UsageError(
            f"the prompt must be at least one token, of ids below the model's {vocab}"
        )


class KeptUsage(NamedTuple):
    """How blocks outside the engine's cache have been used so far. ``looked``: number of blocks that requests have
    looked for when they began, because the engine's cache lacked them. ``sources``: for each source, the blocks that it
    has given and taken.
    """

    looked: int
    sources: Sequence[SourceUsage]


class KeptBlocks(Protocol):
    """Interface of the object that keeps copies of cache blocks outside the engine's cache, in host memory or files,
    and fetches them for requests.
    """

    def settle(self) -> None:
        """Copy the engine's cache blocks that have become full to host memory or files, and write blocks that have been
        fetched from there into the cache. The engine calls this between two steps.
        """

    def pause(self) -> None:
        """Wait a moment for blocks that are being fetched. The engine calls this when it has nothing to compute before
        they come.
        """

    def usage(self) -> KeptUsage:
        """Return how many blocks requests have looked for outside the cache, and how many were read and stored there so
        far. This may be called in any thread.
        """

    def weights_changed(self, version: int, fingerprint: str) -> None:
        """Use no blocks of earlier weights any more. ``version``: number of the new weights. ``fingerprint``: hash of
        them; "": not known, so that no blocks are kept or used before the next change.
        """

    def close(self) -> None:
        """Store the full blocks that are not stored yet, and close the host memory or files that keep them."""


class PolicyUsage(NamedTuple):
    """How much attention and memory a cache policy has saved so far. ``keys``: number of keys that all new tokens would
    have attended to without the policy. ``chosen``: number of keys that they have attended to. ``read``: number of keys
    that were read. ``freed``: number of blocks that were given back because no later token sees them. ``moved``: number
    of blocks that have moved to the host. ``dropped``: how often a text gave all its blocks back, to be computed again.
    """

    keys: int
    chosen: int
    read: int
    freed: int
    moved: int
    dropped: int

    def __str__(self) -> str:
        keys = max(1, self.keys)
        return (
            f"new tokens attended to {self.chosen / keys:.1%} of the keys, and {self.read / keys:.1%} were read; "
            f"{self.freed:,} blocks were given back, {self.moved:,} moved to the host, "
            f"{self.dropped:,} texts computed again"
        )


class StepTaker(Protocol):
    """Interface of an object that takes an engine's steps in place of the engine itself. An example is
    :class:`weft.generate.split_phases.SplitPhases`, which reads prompts in a second process.
    """

    def step(self) -> list[Written]:
        """Compute one step of the engine; return the tokens that it has given, as :meth:`Engine.step` does."""

    def close(self) -> None:
        """End the other processes that take part in the engine's steps."""


class Engine:
    """Generates tokens for many requests with ``model``.

    Args:
        ``tokens``: capacity of the cache for all requests together; None: as many as memory holds.
        ``budget``: largest number of tokens that a step computes.
        ``limit``: largest number of requests in a step.
        ``policy``: shares a step's budget among the requests.
        ``size``: tokens of a cache block; 0: the usual number.
        ``drafter``: guesses next tokens, which changes only the speed; None: no guesses.
        ``invariant``: whether log-probabilities are bitwise equal to those of a pass over the whole text.
        ``ranks``: whether the model is cut over several ranks, of which this is the first; the others run
            :func:`weft.generate.leader.follow_leader`.
        ``attention``: name of the attention backend (:mod:`weft.models.attention_backend`); "": the fastest one.
        ``graphs``: whether steps in which each text computes one token are recorded as CUDA graphs, if the model and
            its device permit it (:mod:`weft.generate.decode_step`); the whole cache is then allocated at once.
        ``cache_policy``: chooses the cached tokens that new tokens attend to
            (:func:`weft.generate.cache_policy.cache_policy_of`); None: all of them.
    """

    def __init__(
        self, model: Transformer, tokens: int | None = None, budget: int = BUDGET, limit: int = 64,
        policy: Policy = exact_fill, size: int = 0, drafter: Drafter | None = None, invariant: bool = False,
        ranks: bool = False, attention: str = "",
        graphs: bool = False, cache_policy: CachePolicy | None = None,
    ) -> None:  # fmt: skip
        if budget < 1 or limit < 1:
            raise UsageError(
                "a step needs room for one token of one request; give a larger budget or limit"
            )
        if drafter is not None and drafter.early_layer:
            check_early_layer(model, drafter.early_layer)
        if invariant:
            check_invariant(model.shape, model.mesh)
        check_attention(attention, invariant, ranks)
        states = any(
            model.shape.mixer_of(i) != "softmax" for i in range(model.shape.layers)
        )
        size = size or (CHUNK if states else BLOCK)
        if cache_policy is not None:
            check_policy(cache_policy, model, size)
            self._check_policy_alone(cache_policy, model, invariant, drafter)
        self.reader: PagedReader | Leader = (
            Leader(model, size, cache_policy.word if cache_policy else NONE)
            if ranks
            else PagedReader(model, size, invariant, attention, cache_policy)
        )
        blocks = 2**40 if tokens is None else max(1, tokens // self.reader.size)
        pool = BlockPool(blocks, self.reader.size, states)
        if isinstance(self.reader, PagedReader):
            if graphs:
                self.reader.record_graphs()
            if tokens is not None:
                self.reader.reserve(blocks)
        self.model, self.drafter, self.scheduler = (
            model,
            drafter,
            Scheduler(pool, budget, limit, policy, cache_policy),
        )
        self.sent: deque[LaunchedPass] = deque()  # the oldest first
        # what lends blocks of this engine's texts to other engines, and what holds blocks of theirs
        self.loans: list[LoanParty] = []
        self.outside: KeptBlocks | None = None  # beyond this engine's cache
        self.phases: StepTaker | None = None  # takes the steps in two processes
        self.watch: StepWatch | None = None  # of the seconds of steps
        # hashes of adapters and other models by their names
        self.adapter_digests = {"": b""}
        if cache_policy is not None:
            cache_policy.attach(self.scheduler)

    @staticmethod
    def _check_policy_alone(
        policy: CachePolicy,
        model: Transformer,
        invariant: bool,
        drafter: Drafter | None,
    ) -> None:
        why = "several ranks along cp" if model.mesh.layout.dp > 1 else ""
        if invariant:
            why = "log-probabilities that do not depend on other requests"
        if drafter is not None and policy.remembers:
            why = "guesses, which would count in its sums of attention weights"
        if why:
            raise UsageError(
                f"the cache policy {policy.word} cannot be combined with {why}; leave one of them out"
            )

    def submit(
        self, ids: Sequence[int], count: int, how: Sampling | None = None, stops: Collection[int] = (), n: int = 1,
        top: int | None = None, tenant: str = "", grammar: Grammar | None = None, adapter: str = "", least: int = 0,
        scored: bool = False, written: Sequence[int] = (), workflow: Workflow | None = None,
        priority: int = 0,
    ) -> list[Generation]:  # fmt: skip
        """Request up to ``count`` tokens after the prompt ``ids``, ``n`` times with consecutive seeds; return the ``n``
        requests. The prompt is computed once for all ``n`` texts. A text ends before one of the ids ``stops``, or of
        the ids that end ``grammar``.

        Args:
            ``how``: settings of sampling.
            ``top``: number of log-probabilities to keep for each token; None: none.
            ``tenant``: requests of different tenants share no cache blocks.
            ``grammar``: constraint on the text.
            ``adapter``: name of an adapter; "": the model alone.
            ``least``: number of tokens that are written before a stop counts, unless the grammar allows nothing else.
            ``scored``: whether log-probabilities of the prompt's tokens are kept, too.
            ``written``: first tokens of the text, if another engine has written them already. They count in ``count``
                and ``least``, and the text goes on as it would there, before texts of the same priority that nobody has
                begun.
            ``workflow``: the job of which the texts are a stage, for policies that heed deadlines.
            ``priority``: requests with a smaller one begin first and lose their cache blocks last.

        Raises :class:`UsageError` for ids that the model does not have, written tokens that the grammar does not allow,
        and prompts that the cache can never hold.
        """
        check_prompt(self.model, ids)
        if written:
            check_prompt(self.model, written)
        how = how or Sampling()
        if adapter and adapter not in self.scheduler.adapter_keys:
            raise UsageError(f"there is no adapter {adapter!r} here")
        if any(not 0 <= i < self.model.shape.vocab for i in how.bias):
            raise UsageError(
                f"a bias is for an id that the model does not have; it has {self.model.shape.vocab}"
            )
        if grammar and written:
            grammar = grammar.copy()
            if not grammar.resume(written):
                raise UsageError(
                    "the written tokens do not follow the grammar; give the grammar that they were written with"
                )
        left = count > len(written)
        # The last token that is written is not computed.
        generations = [
            Generation([*ids, *written], len(ids) + count - 1, adapter, tenant, how=replace(how, seed=how.seed + i),
                       stops={*stops, *grammar.ends} if grammar else stops, prompt=len(ids), top=top,
                       grammar=grammar and grammar.copy(), least=least, finished="" if left else "length",
                       resumed=len(written), workflow=workflow, priority=priority)
            for i in range(n)
        ]  # fmt: skip
        if written:  # who reads it has waited long enough
            for generation in generations:
                generation.arrival -= AHEAD
        if left:
            self.scheduler.add(generations[0])
            generations[0].siblings, generations[0].scored = generations[1:], scored
        return generations

    def add_adapter(self, name: str, adapter: HostAdapter) -> None:
        """Register ``adapter`` under ``name`` for later requests. While requests use it, it lies in cache blocks, which
        are then not free for texts.
        """
        if isinstance(self.reader, PagedReader) and self.reader.alike:
            raise UsageError(
                "what adapters add depends on the batch; leave out invariant"
            )
        keys = self.scheduler.adapter_keys
        if name in keys:
            raise UsageError(
                f"there is an adapter {name!r} already; give this one another name"
            )
        if not any(keys.values()):
            self.probe()
        keys[name] = shelf_keys(name, self.reader.add_adapter(name, adapter))
        self.adapter_digests[name] = adapter.digest

    def add_model(self, name: str, model: Transformer, digest: bytes = b"") -> None:
        """Let later requests name ``model`` in place of an adapter. Modules that the engine's own model has too are
        computed once for the requests of both (:mod:`weft.generate.span_groups`).

        ``digest``: hash of all weights of ``model``, by which cache blocks of its texts are kept outside the engine's
        cache; b"": they are not kept.
        """
        if (
            not isinstance(self.reader, PagedReader)
            or self.reader.alike
            or self.scheduler.cache_policy is not None
        ):
            raise UsageError(
                "several models need one rank, and neither invariant nor a cache policy; leave these out"
            )
        if name in self.scheduler.adapter_keys:
            raise UsageError(
                f"there is a model or adapter {name!r} already; give this one another name"
            )
        check_same_shape(name, model.shape, self.model.shape)
        make_lean(model)
        self.reader.others[name] = model
        self.scheduler.adapter_keys[name] = []
        if digest:
            self.adapter_digests[name] = digest

    def remove_model(self, name: str) -> None:
        """Forget the model ``name``. No request for it may be left. If a model is added under this name later, cache
        blocks of earlier texts are used again.
        """
        assert isinstance(self.reader, PagedReader)
        del self.reader.others[name], self.scheduler.adapter_keys[name]
        self.adapter_digests.pop(name, None)

    def probe(self) -> None:
        """Generate one token. This allocates the cache, after which the bytes of a cache block are known."""
        self.submit([0], 1)
        self.run()

    def fit(self, memory: int) -> int:
        """Limit the cache to ``memory`` bytes; return its capacity in tokens."""
        self.probe()
        block = sum(
            pages.store[:, 0].nbytes
            for pages in self.reader.pages
            if pages.store is not None
        )
        if block:
            self.scheduler.pool.blocks = max(1, memory // block)
            if isinstance(self.reader, PagedReader):
                self.reader.reserve(self.scheduler.pool.blocks)
        return self.scheduler.pool.blocks * self.reader.size

    def report_to(self, warn: Callable[[str], None]) -> None:
        """Print lines about measurements of the ranks with ``warn``: at once the lines of the measurements at the
        start, and later one line after each new measurement. An engine on one rank has no such lines.
        """
        if isinstance(self.reader, Leader):
            self.reader.report = warn
            for line in self.reader.notes:
                warn(line)

    def record_graphs(self) -> None:
        """Record decode steps as CUDA graphs from now on, if the model and its device permit it. The cache still grows
        as texts need it; each time it has grown, steps are recorded again.
        """
        if isinstance(self.reader, PagedReader):
            self.reader.record_graphs()

    @torch.inference_mode()
    def record_steps(self) -> None:
        """Record the CUDA graphs of decode steps for all numbers of requests now, if graphs are used. Otherwise the
        first request that needs a graph would wait while it is recorded.
        """
        if isinstance(self.reader, PagedReader) and self.reader.decoding is not None:
            self.probe()
            self.reader.decoding.record_all(self.scheduler.limit)

    def cancel(self, generation: Generation) -> None:
        """Cancel the request ``generation``, whether it is waiting, running or finished."""
        self.hand_on_prompt(generation)
        if not generation.finished:
            self.scheduler.remove(generation)
        generation.finished = generation.finished or "stop"

    def hand_on_prompt(self, generation: Generation) -> None:
        """Choose another text to compute the prompt of ``generation``, which has been cancelled. Texts with the same
        prompt wait until one of them has computed it. Nothing happens if no unfinished text waits for ``generation``.
        """
        if left := [sibling for sibling in generation.siblings if not sibling.finished]:
            left[0].siblings, generation.siblings = left[1:], []
            self.scheduler.add(left[0])

    @torch.inference_mode()
    def silence(self) -> str:
        """Return which of the engine's other ranks has given no sign of life for some time
        (:data:`weft.generate.tickets.SILENT_S`), in words; "" if all have. Call it a few times a second, in any thread.
        """
        return self.reader.tickets.silence() if isinstance(self.reader, Leader) else ""

    @torch.inference_mode()
    def block_form(self) -> list[LayerPart]:
        """Return, for each layer, the form of a cache block of all ranks together: type, heads and shape of its values.
        Allocates the cache if necessary.
        """
        if any(pages.store is None for pages in self.reader.pages):
            block = self.scheduler.pool.take()
            first = Request([0], 0, table=[block])
            self.reader.start(ScheduledStep({first: 1}, []))()
            self.scheduler.pool.release([block])
        return self.reader.block_form()

    @contextmanager
    def holding(self, requests: Collection[Request]) -> Iterator[None]:
        """Return a context in which ``requests`` are scheduled. The caller may add requests to this collection
        meanwhile. At the end all of them free their cache blocks.
        """
        for request in requests:
            self.scheduler.add(request)
        try:
            yield
        finally:
            for request in requests:
                self.scheduler.remove(request)

    @torch.inference_mode()
    def step(self) -> list[Written]:
        """Launch forward passes until as many are under way as is possible at once. Then wait for the oldest pass, and
        return a list of the tokens that it has given.
        """
        return self.step_alone() if self.phases is None else self.phases.step()

    def step_alone(self) -> list[Written]:
        """Do as :meth:`step`, but without :class:`StepTaker`: all passes run in this process."""
        while len(self.sent) < self.reader.depth and self._send():
            pass
        if not self.sent and self.scheduler.waiting:
            sleep(LOOK_S)  # nothing can begin until blocks come back
        return self.receive(self.sent.popleft()) if self.sent else []

    def settle(self) -> None:
        """Call :meth:`LoanParty.settle` of all objects that lend or borrow cache blocks for this engine."""
        for party in self.loans:
            party.settle()

    @torch.inference_mode()
    def weights_changed(self, version: int, fingerprint: str = "") -> list[Written]:
        """Let everything that is computed from now on come from the weights that the model has now.

        Requests that run go on: their texts stay, and all their keys and values are computed again. All later tokens
        thus have the log-probabilities that the new weights give them after the whole text. No cached block of earlier
        weights is used again, inside the engine or outside. Which weights have written which tokens is in
        :attr:`weft.generate.request.Generation.versions`.

        Between :meth:`drain` and this call the weights may be changed in place. ``version``: number of the new weights.
        ``fingerprint``: a hash of the new weights. If it is "" (not known), the engine no longer stores blocks outside
        its own cache, nor uses those that are there. Returns the tokens of the passes that were under way. Raises
        :class:`UsageError` for an engine over two processes.
        """
        if self.phases is not None:
            raise UsageError(
                "the weights of an engine whose prompts another process reads cannot be changed; use --phases one"
            )
        written = self.drain()
        self.scheduler.renew(version)
        if isinstance(self.reader, PagedReader):
            self.reader.weights_changed()
        if self.outside is not None:
            self.outside.weights_changed(version, fingerprint)
        return written

    @torch.inference_mode()
    def drain(self) -> list[Written]:
        """Wait for all passes under way, and return the tokens that they have given. No pass is launched."""
        written = list[Written]()
        while self.sent:
            written += self.receive(self.sent.popleft())
        return written

    def rest(self) -> list[Written]:
        """Wait for all passes under way, and let the other ranks return from
        :func:`weft.generate.leader.follow_leader`, so that all ranks can do something else, such as train. Return the
        tokens that the passes have given. Requests stay, and the next step goes on with them.
        """
        written = self.drain()
        if isinstance(self.reader, Leader):
            self.reader.rest()
        return written

    def _send(self) -> bool:
        """Launch the next forward pass; return whether there was anything to compute."""
        self.prepare()
        step = self.scheduler.plan(self.reader.depth)
        if step.work:
            try:
                self.sent.append(self.launch(step))
            except LenderLost as lost:
                self._take_back(step)
                for party in self.loans:
                    party.give_up(lost.lender)
        elif self.outside is not None and not self.sent:
            self.outside.pause()
        return bool(step.work)

    def prepare(self) -> None:
        """Prepare the planning of a step: lend or fetch back cache blocks as is due, store and load blocks outside the
        cache, and let the drafter guess.
        """
        scheduler = self.scheduler
        self.settle()
        if self.outside is not None:
            self.outside.settle()
        if self.drafter is not None:
            others = (r for r in scheduler.running if r not in scheduler.due)
            self.drafter.propose([text for r in others for text in r.guessable])

    def launch(self, step: ScheduledStep) -> LaunchedPass:
        """Launch the forward pass of the planned ``step``, and return it without waiting for its end. Raises
        :class:`LenderLost` if an engine that holds blocks of the step's texts does not answer.
        """
        step = step._replace(work=dict(sorted(step.work.items(), key=kinship)))
        if self.watch is not None:
            self.watch.begin(step)
        rows = self.rows_of(step)
        logits = self.reader.start(step, early_exit(self.drafter, rows))
        version = self.scheduler.version
        return LaunchedPass(set_out(self.scheduler, step), rows, logits, version)

    def rows_of(self, step: ScheduledStep) -> list[WantedRows]:
        """Return which rows of logits the requests of ``step`` need, in their order."""
        return [wanted_rows(request, tokens) for request, tokens in step.work.items()]

    def _take_back(self, step: ScheduledStep) -> None:
        """Forget that ``step``, which has failed, was planned. Its tokens are computed in later steps."""
        for request in step.work:
            branches.release(self.scheduler.pool, request)

    def receive(self, launched: LaunchedPass) -> list[Written]:
        """Choose tokens from the logits of the pass ``launched``, and return them; the tokens of one text are in their
        order.
        """
        logits, at, texts = launched.logits(), 0, list[SampledText]()
        self.scheduler.advance(launched.drawn)
        for request, first, prompt, drawn in launched.rows:
            begin, at = at + prompt, at + prompt + drawn
            if prompt:
                request.take_prompt(first, logits[begin - prompt : begin])
            if not drawn:
                continue
            takers = request.take(logits[begin:at])
            for sibling in takers[1:]:
                self.scheduler.fork(request, sibling)
            texts += [SampledText(taker, begin) for taker in takers]
        for text in texts:
            text.generation.note_version(launched.version)
        written = write_next_tokens(logits, texts)
        for text in texts:
            generation = text.generation
            if generation.finished and not generation.kept:
                self.scheduler.remove(generation)
            # it may have lost its blocks
            elif generation.runs and not generation.finished:
                self.scheduler.settle(generation, text.best, text.right)
        return written

    def stream(self, generation: Generation) -> Iterator[int]:
        """Yield the tokens that the engine writes for the request ``generation``, while it also serves other requests.
        Closing the generator cancels the request.
        """
        try:
            for at in count(generation.prompt + generation.resumed):
                while at == len(generation.ids) and not generation.finished:
                    self.step()
                if generation.failure:
                    raise WeftError(generation.failure)
                if at == len(generation.ids):
                    return
                yield generation.ids[at]
        finally:
            self.cancel(generation)

    def run(self) -> None:
        """Take steps until every request has ended. The tokens that were written are then in the requests."""
        while self.step() or self.scheduler.running or self.scheduler.waiting:
            pass

    def travel_summary(self) -> str:
        """Return a line for the user about an engine whose experts are on several ranks: how many rows of tokens and
        results each layer has sent between ranks. "" if they were not counted.
        """
        return self.reader.summary() if isinstance(self.reader, Leader) else ""

    def policy_usage(self) -> PolicyUsage:
        """Return how much attention and memory the cache policy has saved so far, on this rank."""
        selectors = [getattr(each, "selector", None) for each in self.reader.pages]
        reads = [each.reads for each in selectors if each is not None]
        return PolicyUsage(
            sum(each.all for each in reads),
            sum(each.chosen for each in reads),
            sum(each.read for each in reads),
            self.scheduler.hidden_blocks,
            self.scheduler.moved_blocks,
            self.scheduler.preemptions,
        )

    def close(self) -> None:
        """End the other ranks and processes, if there are any, and store the cache blocks that are to outlive the
        engine.
        """
        if self.phases is not None:
            self.phases.close()
        if self.outside is not None:
            self.outside.close()
        for party in self.loans:
            party.close()
        self.reader.close()


def wanted_rows(request: Request, tokens: int) -> WantedRows:
    """Return which rows of logits ``request`` needs from a forward pass over its next ``tokens`` tokens. Some rows
    score the prompt; from the others tokens are sampled.
    """
    drawn = (
        1 + sum(len(branch.path) for branch in request.branches)
        if tokens == request.wanted
        else 0
    )
    return WantedRows(request, request.computed, request.prompt_rows(tokens), drawn)


def kinship(work: tuple[Request, int]) -> tuple[int, int]:
    """Return the key by which the requests of a step are sorted: the number of new tokens, then the number of computed
    tokens. Texts of about equal length thus attend together. ``work``: a request and the number of its tokens in the
    step.
    """
    request, tokens = work
    return tokens, request.computed


def set_out(scheduler: Scheduler, step: ScheduledStep) -> ScheduledStep:
    """Count ``step`` as launched, so that later steps can be planned. Return a step with only those requests that get a
    sampled token.

    The other requests are prompts of which the step computes only a part. Their tokens are counted as computed at once.
    The requests that get a token become ``due``: they are not scheduled again until :meth:`Scheduler.advance` is called
    with the returned step.
    """
    drawn = {
        request: tokens
        for request, tokens in step.work.items()
        if tokens == request.wanted
    }
    scheduler.advance(
        ScheduledStep(
            {r: tokens for r, tokens in step.work.items() if r not in drawn}, []
        )
    )
    scheduler.due |= drawn.keys()
    return ScheduledStep(drawn, [])
