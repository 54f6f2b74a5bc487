"""Moving a request to another engine while it is being written (live migration as in Llumnix, 2406.03243).

Full blocks never change. They are sent in rounds while the request goes on, in each round those that were filled during
the one before. When there are none left, the request stops, and its last block and its state (tokens, sampler) are
sent. Messages are bytes in the format of safetensors, and can be sent in any way. Nothing is lost if one does not
arrive: the first engine can go on with the request, and the other one drops what it has taken.
"""

import json
from dataclasses import asdict
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from weft.errors import UsageError, WeftError
from weft.generate.engine import Engine
from weft.generate.keys import root_key
from weft.generate.request import Generation, Request
from weft.generate.sampling import Sampling

#: The fields of a request that move unchanged.
FIELDS = (
    "ids",
    "most",
    "tenant",
    "computed",
    "prompt",
    "top",
    "least",
    "log_probabilities",
)


class Departure:
    """Sends ``request`` away from ``engine``, which goes on with it until it leaves."""

    def __init__(self, engine: Engine, request: Generation) -> None:
        bound = request.context or request.siblings or request.kept or request.scored
        if bound or request.grammar or request.adapter:
            raise UsageError("a request with a grammar or an adapter, with others that wait for its prompt, or that "
                             "sees others or scores its prompt, cannot move; let it end where it is")  # fmt: skip
        if engine.model.mesh.layout.world > 1:
            raise UsageError(
                "blocks of several ranks cannot move; let the request end where it is"
            )
        self.engine, self.request, self.sent = engine, request, 0

    def round(self) -> bytes | None:
        """The blocks that have been filled since the last round; None if there are none, or it has ended."""
        size = self.engine.scheduler.pool.size
        full = self.request.computed // size if self.request.runs else 0
        return self._message(full, {}) if full > self.sent else None

    def leave(self) -> bytes:
        """The last blocks and the state. The engine forgets the request, which now belongs to whoever gets this."""
        request, engine = self.request, self.engine
        if not request.runs or request.finished or request in engine.scheduler.due:
            raise WeftError(
                "the request does not run any more, or a step with it is under way; it stays"
            )
        state = {name: getattr(request, name) for name in FIELDS}
        state |= {"how": asdict(request.how), "stops": sorted(request.stops)}
        message = self._message(
            -(-request.computed // engine.scheduler.pool.size), state
        )
        engine.scheduler.remove(request)
        return message

    def stay(self) -> None:
        """Go on with the request here, as the last message was refused or lost; its tokens are computed again."""
        self.engine.scheduler.add(self.request)

    def _message(self, end: int, state: dict[str, Any]) -> bytes:
        table = self.request.table[self.sent : end]
        pages = enumerate(self.engine.reader.pages if table else ())
        tensors = {str(number): each.room(0)[:, table].cpu() for number, each in pages}
        about = {
            "first": self.sent,
            "blocks": len(table),
            "size": self.engine.scheduler.pool.size,
            "state": state,
        }
        self.sent = end
        return save(tensors, {"request": json.dumps(about)})


class Arrival:
    """Takes what a :class:`Departure` sends into ``engine``, which then goes on with the request.

    Until then the blocks belong to a placeholder request, from which the one that moves is forked in the end.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.taken = engine, Request([], 0)

    def take(self, message: bytes) -> Generation | None:
        """Keep the blocks of a message. Returns the request, which runs here from now on, if it is the last message.

        Raises :class:`WeftError` if there is no room, or the message is damaged or out of order; all that was taken is
        then given back.
        """
        try:
            about, tensors = parse_message(message)
            self._put(about, tensors)
        except WeftError:
            self.drop()
            raise
        return self._adopt(about["state"]) if about["state"] else None

    def drop(self) -> None:
        """Give back all blocks, as nothing more will come."""
        self.engine.scheduler.remove(self.taken)

    @torch.inference_mode()
    def _put(self, about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        """Append the blocks of a message to those before, if there is room for them, and at the end for the request."""
        scheduler, pool = self.engine.scheduler, self.engine.scheduler.pool
        table = self.taken.table
        if about["first"] != len(table) or about["size"] != pool.size:
            raise WeftError(f"blocks from {about['first']} on of {about['size']} tokens do not go on where "
                            f"{len(table)} blocks of {pool.size} end; send the request again")  # fmt: skip
        if about["blocks"] > pool.free or (
            about["state"] and len(scheduler.running) == scheduler.limit
        ):
            raise WeftError(
                "there is no room for the request here; try another engine, or later"
            )
        fresh = [pool.take() for _ in range(about["blocks"])]
        table += fresh
        for number, pages in enumerate(self.engine.reader.pages if fresh else ()):
            values = tensors.get(str(number))
            if values is None or (
                pages.store is not None and values.shape[2:] != pages.store.shape[2:]
            ):
                raise WeftError(
                    "the blocks are not of this model; give an engine with the same one"
                )
            store = pages.room(max(fresh) + 1, values, len(values), values.shape[2:])
            store[:, fresh] = values.to(store)

    def _adopt(self, state: dict[str, Any]) -> Generation:
        scheduler = self.engine.scheduler
        said = [
            (p, {int(i): q for i, q in top.items()})
            for p, top in state["log_probabilities"]
        ]
        how = Sampling(
            **state["how"]
            | {"bias": {int(i): b for i, b in state["how"]["bias"].items()}}
        )
        request = Generation(**{name: state[name] for name in FIELDS} | {"log_probabilities": said}, how=how,
                             stops=frozenset(state["stops"]))  # fmt: skip
        self.taken.keys, self.taken.computed = (
            [root_key(scheduler.version, "", request.tenant)],
            request.computed,
        )
        scheduler.fork(self.taken, request)
        self.drop()
        return request


def parse_message(message: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a message says, and its blocks by layer."""
    try:
        length = int.from_bytes(message[:8], "little")
        about = json.loads(
            json.loads(message[8 : 8 + length])["__metadata__"]["request"]
        )
        return about, load(message)
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise WeftError(
            f"a message of a moving request is damaged ({error}); send the request again"
        ) from None
