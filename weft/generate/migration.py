"""Moving a request to another engine while it is being written (live migration as in Llumnix, 2406.03243).

Full blocks never change. They are sent in rounds while the request goes on, in each round those that were filled during
the one before, with the tokens written meanwhile. When there are none left, the request stops, and the valid tokens of
its last block and its state are sent. So it stops for a block at most, however long its text is. A frame is a head in
JSON and a raw payload, as :mod:`weft.net.wire` sends them. Nothing is lost if one does not arrive: the first engine can
go on with the request, and the other one drops what it has taken.

While a prompt is computed, its blocks can travel layer by layer instead (:meth:`Departure.stream`): the pass over the
prompt's last tokens then ends when all layers but one have been sent.

Blocks travel in an order that does not depend on ranks (:mod:`weft.generate.block_contents`), so both engines can be
cut differently. What an engine has of its own does not travel: an adapter goes by name, a grammar by its source, and
guesses are made anew.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from time import monotonic
from typing import Any, NamedTuple

import torch

from weft.errors import UsageError, WeftError
from weft.generate.block_contents import LayerPart, bytes_of, tensor_bytes, tensor_of
from weft.generate.engine import Engine, check_prompt
from weft.generate.grammar import Grammar, Kind
from weft.generate.layer_stream import (
    LayerStream,
    can_stream,
    joined_layers,
    write_layers,
)
from weft.generate.reader import PagedReader
from weft.generate.request import Generation, Request
from weft.generate.sampling import Sampling
from weft.generate.workflow import Workflow

T = torch.Tensor

#: Most bytes of blocks in a frame, so that other requests wait for no long copy.
ROUND = 1 << 26

#: The fields of a request that move unchanged.
FIELDS = (
    "most",
    "tenant",
    "adapter",
    "priority",
    "prompt",
    "resumed",
    "top",
    "least",
    "scored",
    "hits",
    "failure",
)

#: The lists of a request that grow: each frame has what was added since the frame before.
GROWING = ("ids", "log_probabilities", "prompt_scores")

#: Why a request has ended in the engine that it left.
MOVED = "moved"

FULL = "there is no room for the request here; try another engine, or later"

#: Compiles a grammar from its source, as :meth:`weft.generate.grammar.Grammars.compile` does.
Compile = Callable[[Kind, str | dict[str, Any]], Grammar]


class MoveFrame(NamedTuple):
    """A message about a request that moves: ``head`` is a JSON object, ``payload`` the contents of cache blocks."""

    head: dict[str, Any]
    payload: Sequence[memoryview]


class Departure:
    """Sends the cache blocks of ``request`` away from ``engine`` in frames, so that another engine can go on with it.
    This engine goes on with the request until :meth:`leave`. Raises :class:`UsageError` for a request that attends to
    the texts of other requests, or to whose text others attend.
    """

    def __init__(self, engine: Engine, request: Generation) -> None:
        bound = (
            request.context
            or request.kept
            or request.pinned
            or request.chances is not None
        )
        if bound:
            raise UsageError(
                "a request that sees other requests, or is seen by them, cannot move; let it end where it is"
            )
        self.engine, self.request = engine, request
        self.version = engine.scheduler.version
        self.sent = 0  # blocks
        self._stream: LayerStream | None = None
        self._grown = dict.fromkeys(GROWING, 0)

    def stream(self, send: Callable[[MoveFrame], None]) -> None:
        """Send cache blocks layer by layer from now on, while the forward pass over the request's tokens still runs.

        Does nothing if blocks have been sent already, if the model has several ranks, or if a layer keeps a recurrent
        state; :meth:`round` then sends whole blocks. ``send``: called in the engine's thread with one frame per layer,
        which the other engine gives to :meth:`Arrival.keep`.
        """
        reader = self.engine.reader

        def take(layer: int, first: int, values: torch.Tensor) -> None:
            head = {"layer": layer, "first": first, "tokens": values.shape[1]}
            send(MoveFrame(head, [tensor_bytes(values)]))

        if (
            not self.sent
            and isinstance(reader, PagedReader)
            and can_stream(reader.pages)
        ):
            self._stream = LayerStream(reader.pages, self.request, take)
            reader.streams.append(self._stream)

    @property
    def streams(self) -> bool:
        """Whether :meth:`stream` has begun to send blocks layer by layer."""
        return self._stream is not None

    def drop(self) -> None:
        """Stop sending layer by layer, because the request has left or stays. Nothing happens if :meth:`stream` was not
        called.
        """
        reader = self.engine.reader
        if isinstance(reader, PagedReader) and self._stream in reader.streams:
            reader.streams.remove(self._stream)

    def round(self) -> MoveFrame | None:
        """Return a frame with the blocks that have become full since the last call; None if there are none."""
        size = self.engine.scheduler.pool.size
        full = self.request.computed // size
        if self._stream is not None and not self._outdated:
            # what passes do not give themselves, such as those with requests to several models
            self._stream.send_all(self.request.computed)
            full = min(full, self._stream.whole // size)
        if not self.request.runs or full <= self.sent or self._outdated or self._lent:
            return None
        most = max(
            1, ROUND // bytes_of(self.engine.block_form(), self.engine.reader.size)
        )
        return self._frame(min(full, self.sent + most), 0, None)

    def leave(self) -> MoveFrame:
        """Return the last frame of the request's move, with the state of the request and the cache blocks that were not
        sent yet. This engine then forgets the request, which belongs to whoever gets the frame.

        Other answers to the same prompt stay here, and can be moved on their own. Raises :class:`WeftError`, and keeps
        the request, if it has ended, if a step with it is under way, or if another engine holds blocks of it. The same
        happens if the engine's weights have changed since the move began.
        """
        request, scheduler = self.request, self.engine.scheduler
        if request.finished:
            raise WeftError("the request has ended and does not move")
        if request in scheduler.due or self._outdated:
            why = (
                "the weights have changed"
                if self._outdated
                else "a step with the request is under way"
            )
            raise WeftError(f"{why}; the request stays, begin again with it")
        if self._lent:
            raise WeftError(
                "blocks of the request lie at another engine; the request stays"
            )
        # what was sent is right, even if the request has lost its blocks since
        computed = max(request.computed, self.sent * scheduler.pool.size)
        if self._stream is not None:
            self._stream.send_all(request.computed)
            computed = max(request.computed, self._stream.whole)
            self.drop()
        end, tokens = divmod(computed, scheduler.pool.size)
        now = monotonic()
        state = {name: getattr(request, name) for name in FIELDS}
        state |= {
            "how": asdict(request.how),
            "stops": sorted(request.stops),
            "computed": computed,
            "workflow": request.workflow and request.workflow.frame(now),
            "waited": now - request.asked_at,
            "versions": request.versions,
        }
        frame = self._frame(end, tokens, state)
        self.engine.hand_on_prompt(request)
        self.engine.scheduler.remove(request)
        request.finished = MOVED
        return frame

    def stay(self) -> None:
        """Go on with the request in this engine after :meth:`leave`, because the last frame was refused or lost. Keys
        and values that the engine has no longer are computed again.
        """
        request, scheduler = self.request, self.engine.scheduler
        request.finished = ""
        others = (*scheduler.running, *scheduler.waiting)
        # whoever reads the prompt for it, too, starts it
        if not any(
            isinstance(other, Generation) and request in other.siblings
            for other in others
        ):
            scheduler.add(request)

    @property
    def _outdated(self) -> bool:
        return self.version != self.engine.scheduler.version

    @property
    def _lent(self) -> bool:
        """Whether blocks that are still to be sent lie at another engine."""
        return any(block < 0 for block in self.request.table[self.sent :])

    def _frame(self, end: int, tokens: int, state: dict[str, Any] | None) -> MoveFrame:
        """The blocks up to ``end``, and of the block behind them the first ``tokens`` tokens."""
        request, engine = self.request, self.engine
        table, last = request.table[self.sent : end], request.table[end : end + 1]
        first, self.sent = self.sent, end
        grown = {name: getattr(request, name) for name in GROWING}
        grammar = request.grammar if self._grown["ids"] == 0 else None
        size, payload, form = engine.reader.size, list[torch.Tensor](), list[Any]()
        if end > first or tokens:
            form = [each.form for each in engine.block_form()]
        if (table or tokens) and self._stream is None:
            payload.append(engine.reader.read_blocks(table, size))
            if tokens:
                payload.append(engine.reader.read_blocks(last, tokens))
        head = {
            "first": first,
            "blocks": end - first,
            "tokens": tokens,
            "size": size,
            "version": self.version,
            "form": form,
            "streamed": self._stream is not None,
            "state": state,
            "grammar": grammar and grammar.source,
            "grown": {name: [at, grown[name][at:]] for name, at in self._grown.items()},
        }
        self._grown = {name: len(values) for name, values in grown.items()}
        return MoveFrame(head, [x.flatten().numpy().data for x in payload if x.numel()])


class Arrival:
    """Receives a request that another engine sends away by a :class:`Departure`. ``engine`` goes on with it after the
    last frame.

    Until then a placeholder request owns the cache blocks that have arrived. The engine takes them back if its own
    requests need them. ``compile``: compiles the request's grammar for this engine's model; None: requests with a
    grammar are refused.
    """

    def __init__(self, engine: Engine, compile: Compile | None = None) -> None:
        self.engine, self.compile, self.taken = engine, compile, Request([], 0)
        self._grown: dict[str, list[Any]] = {name: [] for name in GROWING}
        self._grammar: Future[Grammar] | None = None
        self._begun = False
        # by layer, what has come of tokens whose blocks are not announced yet
        self._parts: dict[int, list[MoveFrame]] = {}

    def keep(self, frame: MoveFrame) -> None:
        """Keep a frame of one layer, which :meth:`Departure.stream` has sent, until the next call of :meth:`take`. This
        method may be called in any thread, but not while :meth:`take` runs.
        """
        self._parts.setdefault(frame.head["layer"], []).append(frame)

    def take(self, frame: MoveFrame) -> Generation | None:
        """Keep the contents of ``frame``. If it is the last frame, start the request in this engine and return it;
        otherwise return None.

        Raises :class:`WeftError` if there is no room, the frame is damaged or out of order, or the engine lacks the
        adapter or the grammars that the request needs. All cache blocks that the request has taken so far are then
        freed.
        """
        try:
            return self._take(frame.head, b"".join(frame.payload))
        except WeftError:
            self.drop()
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.drop()
            raise WeftError(
                f"a frame of a moving request is damaged ({error}); send the request again"
            ) from None

    def drop(self) -> None:
        """Free all cache blocks of the request, because nothing more of it will come."""
        self.engine.scheduler.give_up(self.taken)

    def _take(self, head: dict[str, Any], payload: bytes) -> Generation | None:
        scheduler = self.engine.scheduler
        if self._begun and self.taken not in scheduler.arriving:
            raise WeftError(
                "requests that run here have needed the room of one on its way; send it again later"
            )
        if not self._begun:
            scheduler.arriving.append(self.taken)
            self._begun = True
        if (head["version"], head["size"]) != (
            scheduler.version,
            self.engine.reader.size,
        ):
            raise WeftError(
                f"blocks of {head['size']} tokens and of weights number {head['version']} do not go on where blocks "
                f"have {self.engine.reader.size} tokens and weights number {scheduler.version}; give a like engine"
            )
        state = head["state"]
        if state is not None:
            self._check(state)
        for name, (at, values) in head["grown"].items():
            if at != len(self._grown[name]):
                raise WeftError(
                    f"a frame of a moving request is missing: {name} from {at} on do not go on behind "
                    f"{len(self._grown[name])}; send the request again"
                )
            self._grown[name] += values
        if head["grammar"] is not None:
            self._grammar = self._compiled(head["grammar"])
        first, blocks, tokens = head["first"], head["blocks"], head["tokens"]
        if head["streamed"]:
            self._put_layers(first, blocks, tokens, head["form"])
        else:
            self._put(first, blocks, tokens, head["form"], payload)
        return None if state is None else self._adopt(state)

    def _check(self, state: dict[str, Any]) -> None:
        """Raise :class:`WeftError` if this engine cannot go on with such a request."""
        scheduler = self.engine.scheduler
        if state["adapter"] not in scheduler.adapter_keys:
            raise WeftError(
                f"there is no adapter {state['adapter']!r} here; add it, or move the request to an engine that has it"
            )
        if len(scheduler.running) >= scheduler.limit:
            raise WeftError(FULL)

    def _compiled(self, source: Any) -> Future[Grammar]:
        """Start to compile a grammar, so that it is ready when the last frame comes."""
        if self.compile is None:
            raise WeftError(
                "the request has a grammar, and this engine compiles none; move it to one with a tokenizer"
            )
        thread = ThreadPoolExecutor(1, "grammar")
        try:
            return thread.submit(self.compile, *source)
        finally:
            thread.shutdown(wait=False)

    def _put(
        self, first: int, blocks: int, tokens: int, form: list[Any], payload: bytes
    ) -> None:
        """Write the contents of ``blocks`` full blocks and of ``tokens`` more tokens behind the blocks before."""
        held, size = self.engine.block_form(), self.engine.reader.size
        self._expect(first, blocks, tokens, form)
        lengths = blocks * bytes_of(held, size), bytes_of(held, tokens)
        if len(payload) != sum(lengths):
            raise ValueError(f"{len(payload)} bytes instead of {sum(lengths)}")
        table, middle = self.taken.table, first + blocks
        contents = memoryview(bytearray(payload))
        full, rest = contents[: lengths[0]], contents[lengths[0] :]
        for where, length, part in (
            (table[first:middle], size, full),
            (table[middle:], tokens, rest),
        ):
            if len(part):
                rows = torch.frombuffer(part, dtype=torch.uint8).view(len(where), -1)
                self.engine.reader.write_blocks(where, length, rows)

    def _expect(self, first: int, blocks: int, tokens: int, form: list[Any]) -> None:
        """Take cache blocks for ``blocks`` full blocks and for ``tokens`` more tokens behind the blocks before."""
        held, size = len(self.taken.table), self.engine.reader.size
        if first != held or not 0 <= tokens < size or blocks < 0:
            raise WeftError(
                f"blocks from {first} on do not go on where {held} end; send the request again"
            )
        count = blocks + (tokens > 0)
        if count and form != [each.form for each in self.engine.block_form()]:
            raise WeftError(
                "the blocks are not of this model; give an engine with the same one"
            )
        if not self.engine.scheduler.expect(self.taken, count):
            raise WeftError(FULL)

    def _put_layers(
        self, first: int, blocks: int, tokens: int, form: list[Any]
    ) -> None:
        """Write what has come layer by layer to announced blocks."""
        reader, parts = self.engine.reader, self.engine.block_form()
        if not blocks and not tokens:
            return self._expect(first, blocks, tokens, form)
        begin, count = first * reader.size, blocks * reader.size + tokens
        layers = [
            self._of_layer(self._parts.get(number, []), part, begin, count)
            for number, part in enumerate(parts)
        ]
        if isinstance(reader, PagedReader):
            self._expect(first, blocks, tokens, form)
            write_layers(reader.pages, self.taken.table, begin, layers)
        else:  # other ranks get theirs as if all had come in one frame
            payload = joined_layers(layers, blocks, reader.size)
            self._put(first, blocks, tokens, form, payload)

    def _of_layer(
        self, frames: list[MoveFrame], part: LayerPart, first: int, count: int
    ) -> T:
        """Take ``count`` tokens of a layer, from ``first`` on, out of ``frames``: ``[parts, tokens, heads, width]``."""
        values, begin = list[T](), first
        for head, (raw,) in frames:
            if head["first"] != begin or len(raw) != part.nbytes(head["tokens"]):
                raise ValueError(f"tokens of layer {part.layer} are missing")
            values.append(tensor_of(raw, part.dtype, part.extents(head["tokens"])))
            begin += head["tokens"]
        if begin < first + count:
            raise ValueError(f"tokens of layer {part.layer} are missing")
        whole = values[0] if len(values) == 1 else torch.cat(values, 1)
        later = whole[:, count:]
        head = {"first": first + count, "tokens": later.shape[1]}
        frames[:] = [MoveFrame(head, [tensor_bytes(later)])] if later.shape[1] else []
        return whole[:, :count]

    def _adopt(self, state: dict[str, Any]) -> Generation:
        """Make the request, and let it run with the blocks that have come."""
        ids, computed, size = (
            self._grown["ids"],
            state["computed"],
            self.engine.reader.size,
        )
        check_prompt(self.engine.model, ids)
        held = len(self.taken.table)
        if not 0 <= computed < len(ids) or -(-computed // size) != held:
            raise ValueError(
                f"{computed} computed tokens of {len(ids)} in {held} blocks"
            )
        logs, scores = (
            [(p, {int(i): q for i, q in top.items()}) for p, top in self._grown[name]]
            for name in GROWING[1:]
        )
        bias = {int(i): b for i, b in state["how"]["bias"].items()}
        how = Sampling(**state["how"] | {"bias": bias})
        grammar = self._grammar.result() if self._grammar else None
        if grammar and not grammar.resume(ids[state["prompt"] :]):
            raise WeftError(
                "the grammar does not go on behind the request's text here; let it end where it is"
            )
        now, workflow = monotonic(), state["workflow"]
        own = {name: state[name] for name in FIELDS}
        own |= {
            "workflow": workflow and Workflow.of_frame(workflow, now),
            "asked_at": now - state["waited"],
        }
        request = Generation(
            ids,
            how=how,
            stops=frozenset(state["stops"]),
            grammar=grammar,
            computed=computed,
            log_probabilities=logs,
            prompt_scores=scores,
            versions=[(index, version) for index, version in state.get("versions", ())],
            **own,
        )
        if not self.engine.scheduler.adopt(self.taken, request):
            raise WeftError(FULL)
        return request
