"""A process that owns a file of old keys and values, and computes attention to them where they rest.

It stands for a drive that computes (InstInfer, Pan et al. 2024, 2409.04992): queries come in, and partial attention
with its log-sum-exps goes out. As every pass asks layer after layer, the keys of the next layers are read while a layer
is computed, and while the engine computes the rest of it.
"""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from weft.generate.block_contents import LayerPart, tensor_bytes, tensor_of
from weft.generate.key_file import KeyFile, KeyLayout, KeyRead
from weft.memory.nameless_file import TierError
from weft.models.attention import join
from weft.models.borrowed_keys import LentQuery, LoanPart, Partial, attend_lent
from weft.models.fixed_maximum import FixedSums, query_rows, rows_by_token
from weft.models.numbers import wide
from weft.net.child_pipe import PipeEnd, parent_pipe

T = torch.Tensor

#: The most queries of a text that attend by flat products, which read each key once for all of them.
FLAT = 16


class KeyStretch(NamedTuple):
    """Neighbouring tokens of a text whose keys and values lie together in one extent of the file (:class:`KeyLayout`).
    ``extent``: number of the extent. ``run``: number of the run of the extent in which they begin. ``begin``, ``end``:
    positions in the text of the first token and behind the last one.
    """

    extent: int
    run: int
    begin: int
    end: int


class RestingQuery(NamedTuple):
    """The new queries of one text, and where the text's old keys are in the file. ``first``, ``last``: among all
    queries that were sent together, rows ``first:last`` belong to this text. ``past``: position in the text of the
    first of these queries. ``stretches``: where the text's old tokens lie in the file.
    """

    first: int
    last: int
    past: int
    stretches: Sequence[KeyStretch]


class SeenExtent(NamedTuple):
    """The part of an extent of the file (:class:`KeyLayout`) that some texts' queries need: its first ``runs`` runs.
    ``users``: pairs of the index of a text among the queries, and the stretch of that text's tokens in the extent.
    """

    runs: int
    users: list[tuple[int, KeyStretch]]


class KeyAttention:
    """Computes attention of new tokens to the keys and values of old tokens, which rest in ``file``.

    Exponentials of scores use one fixed maximum first, so that no sum has to be rescaled. The attribute ``again``
    counts texts whose attention was computed a second time, because a score was so far from this maximum that its
    exponential would overflow or lose precision.
    """

    def __init__(self, file: KeyFile) -> None:
        self.file = file
        self.again = 0
        self._windows = [0] * len(file.layout.layers)

    @torch.inference_mode()
    def attend(
        self, layer: int, queries: Sequence[RestingQuery], q: T, window: int
    ) -> Partial:
        """Return the attention of ``q`` ``[queries, heads, width]`` in ``layer`` to the keys in the file, and its
        log-sum-exps ``[queries, heads]``. ``queries``: for each text, which rows of ``q`` are its queries and where its
        keys lie. ``window``: number of tokens that a token sees, itself included; 0: all.
        """
        self._windows[layer] = window
        kv_heads = len(self.file.layout.layers[layer].heads)
        flat = {
            number: FixedSums(query_rows(q[query.first : query.last], kv_heads))
            for number, query in enumerate(queries)
            if query.last - query.first <= FLAT and not window
        }
        out = q.new_zeros(q.shape, dtype=wide(q.dtype))
        lse = torch.full(q.shape[:2], -torch.inf, dtype=out.dtype)
        for number, stretch, keys, values in self._read(layer, queries, window):
            if number in flat:
                flat[number].add(keys, values)
            else:
                _join_stretch(
                    q, queries[number], stretch, keys, values, window, out, lse
                )
        failed = [number for number, sums in flat.items() if not sums.exact]
        for number, sums in flat.items():
            if number not in failed:
                rows = slice(queries[number].first, queries[number].last)
                attended = rows_by_token(sums.out, rows.stop - rows.start)
                out[rows, :, : attended.shape[-1]] = attended
                lse[rows] = rows_by_token(sums.lse, rows.stop - rows.start)
        if failed:
            self.again += len(failed)
            some = [queries[number] for number in failed]
            for number, stretch, keys, values in self._read(layer, some, window):
                _join_stretch(q, some[number], stretch, keys, values, window, out, lse)
        return out, lse

    def _read(
        self, layer: int, queries: Sequence[RestingQuery], window: int
    ) -> Iterator[tuple[int, KeyStretch, T, T]]:
        """Read the extents that ``queries`` see in turn. Yield, for each text that has tokens there, its number, the
        stretch of its tokens, and their keys and values, ``[kv_heads, tokens, width]`` each.
        """
        tokens, seen = self.file.layout.tokens, self._seen(queries, window)
        reads = [KeyRead(layer, extent, each.runs) for extent, each in seen.items()]
        held = self.file.stream(reads, self._later(layer, queries))
        for part, each in zip(held, seen.values(), strict=True):
            for number, stretch in each.users:
                first = stretch.run * tokens
                own = part[:, :, first : first + stretch.end - stretch.begin]
                yield number, stretch, own[:, 0], own[:, -1]

    def _later(self, layer: int, queries: Sequence[RestingQuery]) -> Iterator[KeyRead]:
        """Yield what the next layers will read if the texts stay the same. After the last layer comes the first."""
        count = len(self._windows)
        for number in ((layer + step) % count for step in range(1, count + 1)):
            seen = self._seen(queries, self._windows[number])
            yield from (
                KeyRead(number, extent, each.runs) for extent, each in seen.items()
            )

    def _seen(
        self, queries: Sequence[RestingQuery], window: int
    ) -> dict[int, SeenExtent]:
        """Return what ``queries`` see of which extents, in the order of reading. Texts that share an extent read it
        once.
        """
        seen: dict[int, SeenExtent] = {}
        for number, query in enumerate(queries):
            for stretch in query.stretches:
                if window and query.past - window + 1 >= stretch.end:
                    continue
                runs = (
                    stretch.run
                    - (stretch.begin - stretch.end) // self.file.layout.tokens
                )
                before = seen.get(stretch.extent, SeenExtent(0, []))
                users = [*before.users, (number, stretch)]
                seen[stretch.extent] = SeenExtent(max(runs, before.runs), users)
        return seen


def _join_stretch(
    q: T, query: RestingQuery, stretch: KeyStretch, keys: T, values: T, window: int, out: T, lse: T
) -> None:  # fmt: skip
    """Merge the attention of a text's queries to the keys of one stretch into ``out`` and ``lse``."""
    rows = slice(query.first, query.last)
    lent = LentQuery(*query[:3], [LoanPart(0, stretch.begin, stretch.end)])
    tokens = keys.transpose(0, 1), values.transpose(0, 1)
    join(out[rows], lse[rows], *attend_lent(q[rows], lent, window, lambda _: tokens))


def run_owner(pipe: int) -> None:
    """Run in a process of its own: keep a file of keys and values for the engine's process, and exit when that process
    closes the pipe. ``pipe``: inherited file descriptor of the pipe to the engine's process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve_keys(parent_pipe(pipe))
    # the interpreter's own end takes long, and nothing is left to do
    os._exit(0)


def serve_keys(pipe: PipeEnd) -> None:
    """Execute requests of an engine's process until ``pipe``, through which they come, is closed. A request asks to
    write cache blocks to the file, to compute attention to them, or to return them. A message is a JSON object,
    followed by a message of bytes if the object says so. The first request describes the file; the answer to it is
    an error in words, or the file's warning and the speed of the disk.
    """
    with suppress(EOFError, OSError):
        about = json.loads(pipe.recv_bytes())
        torch.set_num_threads(about["threads"])
        layers = tuple(map(LayerPart.of, about["layers"]))
        layout = KeyLayout(layers, about["size"], about["blocks"], about["runs"])
        try:
            file = KeyFile(
                Path(about["folder"]), layout, about["extents"], about["cached"]
            )
            rate = file.measure() if about["measure"] else 0.0
        except TierError as error:
            return pipe.send_bytes(json.dumps({"error": str(error)}).encode())
        pipe.send_bytes(json.dumps({"note": file.file.note, "rate": rate}).encode())
        attention = KeyAttention(file)
        while True:
            head = json.loads(pipe.recv_bytes())
            payload = (
                memoryview(bytearray(pipe.recv_bytes()))
                if head["bytes"]
                else memoryview(b"")
            )
            try:
                answer = _answer(attention, head, payload)
            except TierError as error:
                return pipe.send_bytes(
                    json.dumps({"error": str(error), "bytes": 0}).encode()
                )
            if answer is not None:
                said, back = answer
                pipe.send_bytes(
                    json.dumps(
                        said | {"number": head["number"], "bytes": len(back)}
                    ).encode()
                )
                for part in back:
                    pipe.send_bytes(part)


def _answer(
    attention: KeyAttention, head: dict[str, Any], payload: memoryview
) -> tuple[dict[str, Any], list[memoryview]] | None:
    """Do what a message asks for. Return the answer and its bytes; None if none is wanted."""
    file = attention.file
    match head["do"]:
        case "write":
            rows = tensor_of(payload, torch.uint8, (head["blocks"], -1))
            file.write(head["extent"], head["run"], rows)
            return None
        case "attend":
            q = tensor_of(
                payload, file.layout.layers[head["layer"]].dtype, head["shape"]
            )
            queries = [
                RestingQuery(
                    first, last, past, [KeyStretch(*each) for each in stretches]
                )
                for first, last, past, stretches in head["queries"]
            ]
            return {}, [
                tensor_bytes(x)
                for x in attention.attend(head["layer"], queries, q, head["window"])
            ]
        case "fetch":
            rows = file.fetch(head["extent"], head["run"], head["blocks"])
            return {}, [tensor_bytes(rows)]
        case _:
            return {"counts": _counts(attention)}, []


def _counts(attention: KeyAttention) -> dict[str, int]:
    """Return what the process has read and written, and its own memory, in bytes."""
    file, memory = attention.file, psutil.Process().memory_info()
    return {
        "read": file.file.bytes["read"], "calls": file.calls, "unused": file.unused, "cached": file.cached_bytes,
        "written": file.file.bytes["written"], "again": attention.again, "own": memory.rss - memory.shared,
    }  # fmt: skip
