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
from functools import partial
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
    token_places,
    write_layer,
)
from weft.generate.reader import PagedReader
from weft.generate.request import Generation, Request
from weft.generate.sampling import Sampling
from weft.generate.workflow import Workflow

T = torch.Tensor

#: Most bytes of blocks in a frame, so that other requests wait for no long copy.
ROUND = 1 << 26

#: Bytes of blocks that are written at a time beside the engine's steps.
PIECE = 1 << 22

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


class BlockRows(NamedTuple):
    """Contents ``rows``, uint8 ``[blocks, bytes]``, of the first ``tokens`` tokens of the cache blocks ``table``."""

    table: Sequence[int]
    tokens: int
    rows: T


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
    grammar are refused. ``call``: has the engine's thread run an action between two steps, without waiting for it. What
    comes layer by layer is then written outside the engine's thread, as soon as that has taken blocks for it, so that
    no step of other requests waits for a long prompt. None: :meth:`take` writes it.
    """

    def __init__(
        self,
        engine: Engine,
        compile: Compile | None = None,
        call: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self.engine, self.compile, self.taken = engine, compile, Request([], 0)
        self._grown: dict[str, list[Any]] = {name: [] for name in GROWING}
        self._grammar: Future[Grammar] | None = None
        self._begun = False
        self._call = call if _writes_beside(engine.reader) else None
        self._announced = 0  # blocks, by frames of whole blocks
        # blocks that the engine was asked for before that, and tokens for which it has taken some
        self._asked, self._room = 0, 0
        self._form: list[LayerPart] = []
        # by layer, what has come and is not written yet, and how many of the text's first tokens are
        self._parts: dict[int, list[MoveFrame]] = {}
        self._there: dict[int, int] = {}
        self._rows: list[BlockRows] = []  # whole blocks that are not written yet
        # the tokens of the frame that was written last, as those of other layers are the same
        self._span, self._places = range(0), torch.empty(0, dtype=torch.int64)

    def keep(self, frame: MoveFrame) -> None:
        """Keep a frame of one layer, which :meth:`Departure.stream` has sent, and write what can be written already.
        This method may be called in any thread, always the same one, but not while :meth:`take` runs.
        """
        head = frame.head
        self._parts.setdefault(head["layer"], []).append(frame)
        if self._call is None:
            return
        blocks = -(-(head["first"] + head["tokens"]) // self.engine.reader.size)
        if blocks > self._asked:
            self._asked = blocks
            self._call(partial(self._book, blocks))
        self.unload()

    def unload(self) -> None:
        """Write what was kept or taken and has cache blocks already. Called in the thread that calls :meth:`keep`."""
        rows, self._rows = self._rows, []
        for each in rows:
            self._write_rows(each)
        for layer, frames in self._parts.items() if self._room else ():
            while frames and self._write_early(layer, frames[0]):
                frames.pop(0)

    def take(self, frame: MoveFrame) -> Generation | None:
        """Keep the contents of ``frame``. If it is the last frame, start the request in this engine and return it;
        otherwise return None.

        Raises :class:`WeftError` if there is no room, the frame is damaged or out of order, or the engine lacks the
        adapter or the grammars that the request needs. All cache blocks that the request has taken so far are then
        freed.
        """
        try:
            pieces = frame.payload
            payload = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            return self._take(frame.head, payload)
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

    def _book(self, blocks: int) -> None:
        """Take cache blocks for the text's first ``blocks`` blocks, if they are free; else :meth:`take` tries again."""
        scheduler, reader = self.engine.scheduler, self.engine.reader
        lacks = blocks - len(self.taken.table)
        if self._begun and self.taken not in scheduler.arriving:
            return
        self._form = self._form or self.engine.block_form()
        if lacks <= 0 or not scheduler.expect(self.taken, lacks):
            return
        self._begin()
        for page in reader.pages if isinstance(reader, PagedReader) else ():
            page.room(max(self.taken.table) + 1)
        self._room = len(self.taken.table) * reader.size

    def _begin(self) -> None:
        if not self._begun:
            self.engine.scheduler.arriving.append(self.taken)
            self._begun = True

    def _write_rows(self, given: BlockRows) -> None:
        """Write whole blocks, a few at a time, unless the engine has taken them back."""
        (table, tokens, rows), reader = given, self.engine.reader
        assert isinstance(reader, PagedReader)
        few = max(1, PIECE // rows.shape[1])
        for at in range(0, len(table), few):
            part = rows[at : at + few]
            with self.engine.scheduler.landing, reader.growing:
                if self.taken in self.engine.scheduler.arriving:
                    reader.write_blocks(table[at : at + few], tokens, part)

    def _write_early(self, layer: int, frame: MoveFrame) -> bool:
        """Write the frame of a layer to blocks that were taken for it; return False if there are none. What is damaged
        is left to :meth:`take`, which says so.
        """
        reader, head, (raw,) = self.engine.reader, frame.head, frame.payload
        span = range(head["first"], head["first"] + head["tokens"])
        if span.stop > self._room or layer not in range(len(self._form)):
            return False
        part = self._form[layer]
        goes_on = span.start == self._there.get(layer, 0)
        if not goes_on or len(raw) != part.nbytes(len(span)):
            return False
        assert isinstance(reader, PagedReader)
        # the engine does not take the blocks back meanwhile, nor replace the cache's memory
        with self.engine.scheduler.landing, reader.growing:
            if self.taken not in self.engine.scheduler.arriving:
                return False
            if span != self._span:
                table = self.taken.table
                self._places = token_places(table, reader.size, span.start, span.stop)
                self._span = span
            values = tensor_of(raw, part.dtype, part.extents(len(span)))
            write_layer(reader.pages[layer], self._places, values)
        self._there[layer] = span.stop
        return True

    def _take(
        self, head: dict[str, Any], payload: bytes | memoryview
    ) -> Generation | None:
        scheduler = self.engine.scheduler
        self.unload()
        if self._begun and self.taken not in scheduler.arriving:
            raise WeftError(
                "requests that run here have needed the room of one on its way; send it again later"
            )
        self._begin()
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
            beside = state is None and self._call is not None
            self._put(first, blocks, tokens, head["form"], payload, beside)
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
        self,
        first: int,
        blocks: int,
        tokens: int,
        form: list[Any],
        payload: bytes | memoryview,
        beside: bool = False,
    ) -> None:
        """Write the contents of ``blocks`` full blocks and of ``tokens`` more tokens behind the blocks before.
        ``beside``: leave that to :meth:`unload`.
        """
        held, size = self.engine.block_form(), self.engine.reader.size
        self._expect(first, blocks, tokens, form)
        lengths = blocks * bytes_of(held, size), bytes_of(held, tokens)
        if len(payload) != sum(lengths):
            raise ValueError(f"{len(payload)} bytes instead of {sum(lengths)}")
        table, middle = self.taken.table, first + blocks
        contents = memoryview(payload)
        if contents.readonly:  # PyTorch takes none
            contents = memoryview(bytearray(payload))
        full, rest = contents[: lengths[0]], contents[lengths[0] :]
        for where, length, part in (
            (table[first:middle], size, full),
            (table[middle:], tokens, rest),
        ):
            if len(part):
                rows = torch.frombuffer(part, dtype=torch.uint8).view(len(where), -1)
                if beside:
                    self._rows.append(BlockRows(where, length, rows))
                else:
                    self.engine.reader.write_blocks(where, length, rows)
        reader = self.engine.reader
        for page in reader.pages if isinstance(reader, PagedReader) and beside else ():
            page.room(max(table) + 1)

    def _expect(self, first: int, blocks: int, tokens: int, form: list[Any]) -> None:
        """Take cache blocks for ``blocks`` full blocks and for ``tokens`` more tokens behind the blocks before, unless
        they were taken already.
        """
        held, size = self._announced, self.engine.reader.size
        if first != held or not 0 <= tokens < size or blocks < 0:
            raise WeftError(
                f"blocks from {first} on do not go on where {held} end; send the request again"
            )
        count = blocks + (tokens > 0)
        if count and form != [each.form for each in self.engine.block_form()]:
            raise WeftError(
                "the blocks are not of this model; give an engine with the same one"
            )
        lacks = first + count - len(self.taken.table)
        if lacks > 0 and not self.engine.scheduler.expect(self.taken, lacks):
            raise WeftError(FULL)
        self._announced += count

    def _put_layers(
        self, first: int, blocks: int, tokens: int, form: list[Any]
    ) -> None:
        """Write what has come layer by layer to announced blocks, as far as it is not written yet."""
        reader, parts = self.engine.reader, self.engine.block_form()
        if not blocks and not tokens:
            return self._expect(first, blocks, tokens, form)
        end = (first + blocks) * reader.size + tokens
        begins = [self._there.get(number, 0) for number in range(len(parts))]
        layers = [
            self._of_layer(self._parts.get(number, []), part, begin, end - begin)
            for number, (part, begin) in enumerate(zip(parts, begins, strict=True))
        ]
        if isinstance(reader, PagedReader):
            self._expect(first, blocks, tokens, form)
            table = self.taken.table
            for page, begin, values in zip(reader.pages, begins, layers, strict=True):
                if begin >= end:
                    continue
                page.room(max(table) + 1)
                places = token_places(table, reader.size, begin, end)
                write_layer(page, places, values)
                page.loaded(table[first : -(-end // reader.size)])
        else:  # other ranks get theirs as if all had come in one frame
            payload = joined_layers(layers, blocks, reader.size)
            self._put(first, blocks, tokens, form, payload)
        ends = (max(begin, end) for begin in begins)
        self._there = dict(enumerate(ends))

    def _of_layer(
        self, frames: list[MoveFrame], part: LayerPart, first: int, count: int
    ) -> T:
        """Take ``count`` tokens of a layer, from ``first`` on, out of ``frames``: ``[parts, tokens, heads, width]``;
        none if ``count`` is not positive.
        """
        values, begin = list[T](), first
        if count <= 0:
            return torch.empty(part.extents(0), dtype=part.dtype)
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
        # those behind a pass that has failed
        surplus = self.taken.table[self._announced :]
        del self.taken.table[self._announced :]
        self.engine.scheduler.pool.release(surplus)
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


def _writes_beside(reader: object) -> bool:
    """Whether blocks can be written while the engine's thread computes: those of a cache in the host's memory that
    keeps keys and values of tokens and nothing about them.
    """
    return (
        isinstance(reader, PagedReader)
        and reader.model.mesh.device.type == "cpu"
        and can_stream(reader.pages)
        and not any(getattr(page, "selector", None) for page in reader.pages)
    )
