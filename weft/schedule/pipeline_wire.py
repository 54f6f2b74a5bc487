"""The wire between the ranks of a pipeline: values travel asynchronously, in order, with their shapes."""

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.net.groups import new_group
from weft.net.lost import PeerLost, peer_lost
from weft.schedule.actions import Value

#: The shape and type of each tensor of a value.
Specs = list[tuple[tuple[int, ...], torch.dtype]]
Spec = Callable[[Value], Specs | None]

#: Limits of tensors in a value and of dimensions of a tensor, where shapes travel with the data.
TENSORS, DIMS = 4, 6
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
)


@dataclass
class _Arrival:
    """A value that this rank receives: first its header, if its shape is unknown, then its tensors."""

    value: Value
    header: torch.Tensor | None
    tensors: list[torch.Tensor]
    works: list[dist.Work]


class Wire:
    """Asynchronous transfers of values (results of actions) between the ranks of one pipeline.

    Ranks are numbered along the mesh axis ``pp``. On NCCL each pair of a sender and a receiver has its own
    communicator. If both directions shared one, two ranks that send to each other would wait for each other for ever.

    Args:
        ``group``: process group of the pipeline.
        ``device``: where received tensors are allocated.
        ``timeout``: seconds that a rank waits for a value.
        ``spec``: function that returns the shapes and types of a value's tensors, if the receiver knows them
            beforehand. If it returns None, a header with shapes and types is sent before the tensors.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: float = 600,
        spec: Spec = lambda value: None,
    ) -> None:
        self.group, self.device, self.timeout, self.spec = group, device, timeout, spec
        self.rank = group.rank()
        self.ranks = dist.get_process_group_ranks(group)
        self.bytes_sent = 0
        self._pairs: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._sent: dict[int, deque[list[tuple[dist.Work, torch.Tensor]]]] = (
            defaultdict(deque)
        )
        self._asked: dict[int, deque[_Arrival]] = defaultdict(deque)
        self._tags: dict[tuple[int, int], int] = defaultdict(int)

    def connect(self, pairs: set[tuple[int, int]]) -> None:
        """Make a communicator for each pair ``(source, target)`` of ranks in ``pairs``, where the backend is NCCL.

        Collective: all ranks of the pipeline call this.
        """
        for pair in sorted(pairs - self._pairs.keys()):
            if self.device.type == "cuda" and self.rank in pair:
                members = sorted(self.ranks[r] for r in pair)
                name = f"pipeline {self.ranks[pair[0]]} to {self.ranks[pair[1]]}"
                self._pairs[pair] = new_group(members, name)

    def _link(self, source: int, target: int) -> tuple[dist.ProcessGroup, int]:
        self._tags[source, target] = tag = (self._tags[source, target] + 1) % (1 << 30)
        return self._pairs.get((source, target), self.group), tag

    def send(self, value: Value, payload: Any, target: int, window: int) -> None:
        """Start to send ``payload``, the tensors of ``value``, to rank ``target``.

        If ``window`` values to that rank are under way, wait until one has arrived.
        """
        tensors = _tensors(payload)
        if self.spec(value) is None:
            tensors = [_header(tensors, self.device), *tensors]
        queue = self._sent[target]
        while len(queue) >= window:
            self._finish(queue.popleft(), value, target)
        works = []
        for tensor in tensors:
            group, tag = self._link(self.rank, target)
            tensor = tensor.detach().contiguous()
            self.bytes_sent += tensor.numel() * tensor.element_size()
            try:
                work = dist.isend(tensor, self.ranks[target], group=group, tag=tag)
            except RuntimeError as error:
                raise self._lost(target, f"hands it {value}", error) from error
            assert work is not None
            works.append((work, tensor))
        queue.append(works)

    def ask(self, value: Value, source: int) -> None:
        """Post the receive of ``value`` from rank ``source``.

        Values from one rank must be asked for in the order in which that rank sends them.
        """
        queue, spec = self._asked[source], self.spec(value)
        arrival = _Arrival(value, None, [], [])
        if spec is not None and not any(a.header is not None for a in queue):
            self._post(arrival, spec, source)
        else:  # messages of one link match in order: a header waits until the sizes of what precedes it are known
            arrival.header = torch.zeros(
                1 + TENSORS * (2 + DIMS), dtype=torch.int64, device=self.device
            )
        queue.append(arrival)

    def take(self, value: Value, source: int, purpose: str) -> Any:
        """Wait for ``value`` from rank ``source``. Returns its tensors: a tensor, a tuple of several, or None.

        Values must be asked for first (:meth:`ask`), and taken from each rank in the order in which they were asked
        for. ``purpose``: the action that needs the value, for error messages. Raises :class:`weft.net.lost.PeerLost` if
        the value does not arrive.
        """
        queue = self._asked[source]
        arrival = queue[0]
        assert arrival.value == value, f"{value} is taken before {arrival.value}"
        try:
            if arrival.header is not None:
                spec = self.spec(value)
                if spec is None:
                    self._wait(self._receive(arrival.header, source))
                    spec = _read_header(arrival.header)
                self._post(arrival, spec, source)
            for work in arrival.works:
                self._wait(work)
        except RuntimeError as error:
            doing = f"waits for {value} from it to run {purpose}"
            raise self._lost(source, doing, error) from error
        queue.popleft()
        tensors = arrival.tensors
        if len(tensors) > 1:
            return tuple(tensors)
        return tensors[0] if tensors else None

    def flush(self) -> None:
        """Wait until all values that this rank sent have been received."""
        for target, queue in self._sent.items():
            while queue:
                self._finish(queue.popleft(), None, target)

    def _finish(
        self,
        sent: list[tuple[dist.Work, torch.Tensor]],
        value: Value | None,
        target: int,
    ) -> None:
        try:
            for work, _ in sent:
                self._wait(work)
        except RuntimeError as error:
            doing = f"waits until it takes {value or 'what was sent'}"
            raise self._lost(target, doing, error) from error

    def _wait(self, work: dist.Work) -> None:
        work.wait(timedelta(seconds=self.timeout))

    def _post(self, arrival: _Arrival, spec: Specs, source: int) -> None:
        for shape, dtype in spec:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            arrival.tensors.append(tensor)
            arrival.works.append(self._receive(tensor, source))

    def _receive(self, tensor: torch.Tensor, source: int) -> dist.Work:
        group, tag = self._link(source, self.rank)
        work = dist.irecv(tensor, self.ranks[source], group=group, tag=tag)
        assert work is not None
        return work

    def _lost(self, peer: int, doing: str, error: RuntimeError) -> PeerLost:
        asked = self.ranks[peer]
        return peer_lost(error, asked, doing, self.timeout) or PeerLost(
            f"rank {asked} is late or gone: {error}"
        )


def _tensors(payload: Any) -> list[torch.Tensor]:
    if payload is None:
        return []
    return list(payload) if isinstance(payload, tuple | list) else [payload]


def _header(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if len(tensors) > TENSORS or any(t.dim() > DIMS for t in tensors):
        raise ValueError(
            f"a value that travels has at most {TENSORS} tensors of at most {DIMS} dimensions"
        )
    rows = [
        [DTYPES.index(t.dtype), t.dim(), *t.shape, *[0] * (DIMS - t.dim())]
        for t in tensors
    ]
    rows += [[0] * (2 + DIMS)] * (TENSORS - len(tensors))
    return torch.tensor(
        [len(tensors), *(n for row in rows for n in row)],
        dtype=torch.int64,
        device=device,
    )


def _read_header(header: torch.Tensor) -> Specs:
    count, *numbers = header.tolist()
    rows = [numbers[i * (2 + DIMS) : (i + 1) * (2 + DIMS)] for i in range(count)]
    return [(tuple(row[2 : 2 + row[1]]), DTYPES[row[0]]) for row in rows]
