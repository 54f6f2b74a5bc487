"""Layers of a pipeline that change their rank are copied there beside the steps that go on meanwhile.

Once all ranks know that a stage is slow, they know under which layout they will go on, and so which layers move. Each
rank sends the parameters and moments of its moving layers to their next rank, in a thread of its own, and trains on. A
step changes them, so that the gradients by which a layer is updated follow: they are a third of what an update by Adam
changes, and the receiver applies the same update to what it has. When all copies are there the ranks end their view;
only the gradients of the last step are then under way. (ElasWave, 2025, lets layers migrate without a stop.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from weft.layout.axes import AXES
from weft.layout.dims import Logical, Tensor, extents
from weft.layout.layout import Layout
from weft.layout.parts import TORCH_DTYPES, Part
from weft.layout.placement import Place, Placement
from weft.memory.on_device import OnDevice
from weft.net.endpoint import Endpoint
from weft.net.wire import Head, SealedConnection
from weft.parallel.state import Held, State, Updater
from weft.recipe.conflicts import AskedRecipe
from weft.recipe.step_techniques import asked_techniques
from weft.resilience.views import Member
from weft.schedule.stages import assign_stages, make_table
from weft.shapes.dim import Dim
from weft.train.setup import Job

if TYPE_CHECKING:
    from weft.train.rule_optimizer import RuleOptimizer

T = torch.Tensor

#: Seconds between two attempts to reach a rank that has not begun to receive, and between two looks whether to give up.
DIAL_S = 0.05
#: Bytes that may wait to be sent, relative to those of the moving layers with their moments. A network that takes a
#: step's gradients within a step never lets so many wait; through a slower one the copies would never be complete.
ROOM = 3


class LayerMove(NamedTuple):
    """Move of a layer to another rank. ``layer``: its index; ``source``, ``target``: coordinates of the old and the
    new rank along ``pp``.
    """

    layer: int
    source: int
    target: int


def layer_ranks(job: Job, layout: Layout) -> list[int]:
    """Return for each layer the coordinate along ``pp`` of the rank that holds it; an empty list if ranks share a
    stage.

    ``job``: the checked recipe; ``layout``: its layout, or another with as many ranks.
    """
    length = job.recipe.data.seq_len
    table = make_table(layout, 2 * layout.pp, job.shape, length)
    ranks: dict[int, int] = {}
    for number, stage in enumerate(assign_stages(job.shape, layout, table, length)):
        holders = table.holders(number)
        if len(holders) != 1:
            return []
        ranks |= dict.fromkeys(stage.layers, holders[0])
    return [ranks[layer] for layer in sorted(ranks)]


def layer_moves(job: Job, before: Layout, after: Layout) -> list[LayerMove]:
    """Return a list of the layers that change their rank when the layout ``before`` is replaced by ``after``, each with
    its old and new rank.
    """
    pairs = zip(layer_ranks(job, before), layer_ranks(job, after), strict=False)
    return [
        LayerMove(layer, source, target)
        for layer, (source, target) in enumerate(pairs)
        if source != target
    ]


def can_copy_ahead(job: Job, state: State) -> bool:
    """Return whether layers can be copied to another rank while training goes on, by repeating their updates there.

    That needs an update rule that works element by element, and a state on the device. There may be no technique that
    changes the step, no postponed update, and no expert that has moved between ranks. ``job``: the checked recipe;
    ``state``: this rank's state.
    """
    recipe, optimizer = job.recipe, state.optimizer
    asked = AskedRecipe(**dict(recipe), shape=job.shape)
    return (
        bool(getattr(getattr(optimizer, "rule", None), "elementwise", False))
        and not recipe.optimizer.post_validation
        and not any(asked_techniques(asked))
        and type(state.tiers) is OnDevice
        and not state.due
        and all(held.rows is None for held in state.held)
    )


def counterpart(layout: Layout, rank: int, stage: int) -> int:
    """Return the rank that differs from ``rank`` only in its coordinate along ``pp``, which is ``stage``."""
    own = Place.of(layout, rank)
    wanted = {axis: own.rank(axis) for axis in AXES} | {"pp": stage}
    return next(
        other
        for other in range(layout.world)
        if all(Place.of(layout, other).rank(axis) == at for axis, at in wanted.items())
    )


def _bytes_of(tensor: T) -> memoryview:
    """Return the bytes of ``tensor``, which the result keeps alive."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data


class LayerMessage(NamedTuple):
    """A message to the rank ``target``: JSON values (``head``) and ``tensors``, whose bytes are sent."""

    target: int
    head: Head
    tensors: Sequence[T]

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class LayerOutbox:
    """Queue of messages that wait to be sent. After a failure it discards all messages.

    Attributes:
        ``room``: largest number of bytes of tensors that may wait.
        ``problem``: why nothing more is sent; "" if nothing has failed.
        ``closed``: whether waiting messages and new ones are discarded.
        ``waiting``: bytes of tensors that wait, or are being sent.
    """

    def __init__(self) -> None:
        self.room, self.problem, self.waiting, self.closed = 0, "", 0, False
        self._queue: SimpleQueue[LayerMessage | None] = SimpleQueue()
        self._lock = Lock()

    def put(self, message: LayerMessage) -> None:
        """Append ``message`` to the queue.

        If there is no room for it, call :meth:`fail`, which discards all messages.
        """
        if self.closed:
            return
        with self._lock:
            self.waiting += message.size
            waiting = self.waiting
        if waiting > self.room:
            self.fail(
                f"rank {message.target} takes less than the steps give: {waiting / 2**20:.1f} MiB wait"
            )
        else:
            self._queue.put(message)

    def end(self) -> None:
        """Let the iterator :meth:`messages` end after the messages that are in the queue now."""
        self._queue.put(None)

    def fail(self, why: str) -> None:
        """Discard all waiting and all new messages, for the reason ``why``. Only the first reason is kept."""
        self.problem, self.closed = self.problem or why, True

    def messages(self) -> Iterator[LayerMessage]:
        """Yield the messages in the order of :meth:`put`, and wait for more until :meth:`end` is called.

        After a failure no message is yielded.
        """
        while (message := self._queue.get()) is not None:
            if not self.closed:
                yield message
            with self._lock:
                self.waiting -= message.size
            del message  # a gradient goes as soon as it is sent


@dataclass(eq=False)
class SentLayers:
    """Update rule that also sends the gradients of moving layers to the ranks to which these layers move.

    A receiving rank repeats the update on its copy of the layer. ``rule``: the update rule; ``targets``: the rank to
    which each moving parameter goes, by the parameter's name; ``outbox``: queue of messages, which another thread
    sends.
    """

    rule: Updater
    targets: Mapping[str, int]
    outbox: LayerOutbox

    def slots(self, held: Held) -> dict[str, Part]:
        return self.rule.slots(held)

    def __call__(self, held: Sequence[Held], grads: Sequence[T], lr: float) -> None:
        for h, grad in zip(held, grads, strict=True):
            if h.name in self.targets and not self.outbox.closed:
                head = {"kind": "gradient", "name": h.name, "lr": lr}
                # an update may change the gradient
                copy = [grad.detach().clone()]
                self.outbox.put(LayerMessage(self.targets[h.name], head, copy))
        self.rule(held, grads, lr)


@dataclass(eq=False)
class LayersAhead:
    """Copies layers to the ranks that will hold them under the next layout, while training goes on.

    This rank sends its own layers that move, and receives those that move to it. Create the object on all ranks between
    the same two steps.

    Attributes:
        ``state``: this rank's state, whose update rule sends gradients from now on.
        ``job``: the checked recipe with the present layout.
        ``after``: the layout to which the layers move.
        ``rank``: this rank in the present view.
        ``members``: members of the present view, by rank.
        ``endpoint``, ``token``: listener of this process, and the run's secret.
        ``epoch``: number of the present view.
        ``limit``: seconds that a transfer may take.
        ``sent``: bytes sent so far.
    """

    state: State
    job: Job
    after: Layout
    rank: int
    members: Sequence[Member]
    endpoint: Endpoint
    token: str
    epoch: int
    limit: float
    sent: int = 0
    _copied: bool = False
    _came: dict[str, Held] = field(default_factory=dict)
    # by the ranks that send: the step at whose end they have sent all
    _ends: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        before = self.job.recipe.layout
        own = Place.of(before, self.rank).rank("pp")
        moves = layer_moves(self.job, before, self.after)
        self.targets = {
            f"blocks.{move.layer}.": counterpart(before, self.rank, move.target)
            for move in moves
            if move.source == own
        }
        self._sources = {
            counterpart(before, self.rank, move.source)
            for move in moves
            if move.target == own
        }
        assert self.state.optimizer is not None
        self._rule: RuleOptimizer = self.state.optimizer  # type: ignore[assignment]
        self._outbox, self._closed = LayerOutbox(), Event()
        self._channel = self.endpoint.open(self._name, self.token, self._receive)
        self._links: dict[int, SealedConnection] = {}
        self._begin()
        self._thread = Thread(target=self._work, name="weft-layers", daemon=True)
        self._thread.start()

    @property
    def _name(self) -> str:
        return f"layers/{self.epoch}"

    @property
    def there(self) -> bool:
        """Whether no layer of this rank is still on its way: all have arrived at other ranks, or will never arrive."""
        return self._copied or bool(self.problem)

    @property
    def problem(self) -> str:
        """Why layers could not be copied while training goes on; "" if they could.

        If they could not, they move together with the rest of the state when the layout changes.
        """
        return self._outbox.problem

    def _begin(self) -> None:
        """Copy the moving parameters with their slots, as they are between these two steps."""
        targets: dict[str, int] = {}
        copies = []
        for held in self.state.held:
            block = ".".join(held.name.split(".")[:2]) + "."
            if block in self.targets and held.local.numel():
                targets[held.name] = self.targets[block]
                copies.append(LayerMessage(self.targets[block], *_described(held)))
        self._outbox.room = ROOM * sum(message.size for message in copies)
        for message in copies:
            self._outbox.put(message)
        self._last_copy = copies[-1] if copies else None
        self._copied = not copies
        self.state.optimizer = SentLayers(self._rule, targets, self._outbox)

    # --- what the guard calls ---

    def finish(self, step: int, gives_up: Callable[[], object] = lambda: False) -> None:
        """Tell the receiving ranks that ``step`` was the last step, and wait until everything is sent, up to ``limit``
        seconds.

        The state may take no further step. ``gives_up``: returns whether waiting has become useless, as a rank is lost.
        """
        for target in {*self.targets.values()}:
            self._outbox.put(LayerMessage(target, {"kind": "end", "step": step}, []))
        self._outbox.end()
        deadline = time.monotonic() + self.limit
        while self._thread.is_alive() and not self.problem:
            if gives_up() or time.monotonic() > deadline:
                self._outbox.fail(f"the last gradients had not come after step {step}")
            self._thread.join(DIAL_S)

    def parts(self, step: int) -> Iterator[tuple[str, Part]]:
        """Yield the name and the values of each tensor of the layers that this rank has received.

        Nothing is yielded unless all these layers are complete, and have their values after step number ``step``.
        """
        if not self._sources or {*self._ends} != self._sources:
            return
        if {*self._ends.values()} != {step}:
            return
        for held in self._came.values():
            yield f"model.{held.name}", held.part(held.local)
            for name, part in held.slots.items():
                yield f"optimizer.{name}.{held.name}", part

    def close(self) -> None:
        """Stop sending and receiving layers, and leave the update rule as it was."""
        if isinstance(self.state.optimizer, SentLayers):
            self.state.optimizer = self._rule
        self._closed.set()
        self._outbox.closed = True
        self._outbox.end()
        self._channel.close()

    # --- in the thread that sends ---

    def _work(self) -> None:
        for message in self._outbox.messages():
            try:
                self._send(message)
            # whatever it is: the layers then move after the steps, with all else
            except Exception as error:
                if not self._outbox.closed:
                    why = f"rank {message.target}: {_words_of(error)}"
                    self._outbox.fail(why)
            self._copied = self._copied or message is self._last_copy
        for link in self._links.values():
            link.close()

    def _send(self, message: LayerMessage) -> None:
        target = message.target
        if target not in self._links:
            self._links[target] = self._dial(target)
        link = self._links[target]
        payload = [_bytes_of(tensor) for tensor in message.tensors]
        self.sent += link.send(message.head, payload)
        link.receive(limit=self.limit)

    def _dial(self, target: int) -> SealedConnection:
        deadline = time.monotonic() + self.limit
        while True:
            try:
                return self._channel.dial(
                    self.members[target].address,
                    {"rank": self.rank},
                    self.limit,
                    self.limit,
                )
            except OSError:
                if time.monotonic() > deadline or self._closed.wait(DIAL_S):
                    raise

    # --- in the threads that receive ---

    def _receive(self, connection: SealedConnection) -> None:
        source = int(connection.hello["rank"])
        try:
            while True:
                self._take(source, *connection.receive())
                connection.send({})
        except OSError:  # all has come, or the other end says why not
            return
        # the other end sees the connection end, and sends no more
        except Exception as error:
            self._outbox.fail(f"what rank {source} sent: {_words_of(error)}")
        finally:
            connection.close()

    def _take(self, source: int, head: Head, payload: memoryview) -> None:
        if head["kind"] == "end":
            self._ends[source] = head["step"]
        elif head["kind"] == "gradient":
            held = self._came[head["name"]]
            gradient = torch.frombuffer(payload, dtype=held.local.dtype)
            lr = float(head["lr"])
            self._rule([held], [gradient.view(held.local.shape)], lr)
        else:
            self._came[head["name"]] = _taken(head, payload)


def _words_of(error: Exception) -> str:
    """Return what ``error`` says, in words."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _described(held: Held) -> tuple[Head, list[T]]:
    """Return what describes ``held``, as JSON, and copies of its value and its slots."""
    parts = {"": held.part(held.local), **held.slots}
    about = [
        {
            "slot": name,
            "box": part.box,
            "shape": part.tensor.shape,
            "dtype": part.tensor.dtype,
            "dims": part.tensor.dims,
        }
        for name, part in parts.items()
    ]
    head: Head = {
        "kind": "layer",
        "name": held.name,
        "updates": int(held.updates),
        "learns": held.learns,
        "dims": [[dim.name, dim.count, dim.unit] for dim in held.logical.dims],
        "parts": about,
    }
    return head, [part.values.detach().clone() for part in parts.values()]


def _taken(head: Head, payload: memoryview) -> Held:
    """Return the parameter that :func:`_described` has described; ``payload``: its value and its slots."""
    parts: dict[str, Part] = {}
    start = 0
    for about in head["parts"]:
        box = tuple((lo, hi) for lo, hi in about["box"])
        dtype, dims = about["dtype"], tuple(about["dims"])
        tensor = Tensor(tuple(about["shape"]), dtype, dims)
        shape = extents(box)
        values = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
        _bytes_of(values)[:] = payload[start : start + values.nbytes]
        start += values.nbytes
        parts[about["slot"]] = Part(values, box, tensor)
    whole = parts.pop("")
    logical = Logical(tuple(Dim(*dim) for dim in head["dims"]), None, (), whole.box)
    parameter = nn.Parameter(whole.values, requires_grad=bool(head["learns"]))
    held = Held(
        head["name"], logical, Placement(whole.box, 0, 1), whole.values, parameter
    )
    held.slots, held.updates = parts, torch.tensor(float(head["updates"]))
    return held
