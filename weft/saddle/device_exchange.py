"""How devices agree on a mean: each sends to a server, and the server sends the mean back to all.

The devices are spread over the data parallel ranks, the same number on each, and the first rank is the server. Sums
have the order of the devices, so that the mean does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist

from weft.layout.mesh import Mesh
from weft.saddle.direction import Direction
from weft.saddle.saddle_problem import Values
from weft.sync.compress import encode_with_feedback

T = torch.Tensor

#: Seeds of one tensor of one device are this far from those of the next; there are never so many rounds.
APART = 1 << 32


@dataclass
class DeviceExchange:
    """Exchanges vectors between the simulated devices of a saddle problem and the server, which is the first rank. Each
    device has an objective of its own; a rank computes several of them. Every rank makes the same calls. ``mesh``: the
    mesh, over whose data parallel ranks the devices are divided. ``devices``: number of all devices. ``seed``: seed of
    the compressors' random choices.

    Attributes:
        ``sent``: bytes that this rank has sent to other ranks.
    """

    mesh: Mesh
    devices: int
    seed: int = 0
    sent: int = field(default=0, init=False)

    @property
    def own(self) -> range:
        """Numbers of the simulated devices whose objectives this rank computes."""
        count = self.devices // self.mesh.layout.dp
        first = self.mesh.rank("dp") * count
        return range(first, first + count)

    @property
    def serves(self) -> bool:
        """Whether this rank is the server, to which devices send their vectors."""
        return self.mesh.rank("dp") == 0

    def mean(
        self, parts: Sequence[Values], number: int, up: Direction, down: Direction
    ) -> Values:
        """Send the vectors of all devices to the server, and their mean back. Return the mean with its errors of
        compression, the same on all ranks. All ranks must call it. ``parts``: for each device of this rank, a tensor
        for each parameter. ``number``: number of the exchange, which seeds random choices. ``up``, ``down``:
        compression on the way to the server and on the way back.
        """
        like = parts[0]
        messages = [
            self._message(up, part, device, number)
            for device, part in zip(self.own, parts, strict=True)
        ]
        everyone = self._gathered(torch.stack(messages))  # [devices, bytes]
        answer = torch.empty(
            down.nbytes(like), dtype=torch.uint8, device=everyone.device
        )
        if self.serves:
            arrived = [
                self._read(up, everyone[device], like, device, number)
                for device in range(self.devices)
            ]
            mean = {name: _mean([part[name] for part in arrived]) for name in like}
            answer = self._message(down, mean, self.devices, number)
        self._broadcast(answer)
        return self._read(down, answer, like, self.devices, number)

    def _seed(self, sender: int, index: int, number: int) -> int:
        """Return the seed for the tensor ``index`` of a ``sender``; successive exchanges have successive seeds."""
        slots = self.devices + 1
        slot = (self.seed * 1_000_003 + index) * slots + sender
        return (slot % (1 << 30)) * APART + number

    def _message(self, way: Direction, part: Values, sender: int, number: int) -> T:
        """Return the tensors of ``part``, compressed, as bytes end to end; updates the sender's residuals."""
        pieces: list[T] = []
        for index, (name, tensor) in enumerate(part.items()):
            residual = way.residuals[sender][name] if way.residuals else None
            payload, left = encode_with_feedback(
                way.compressor, tensor, self._seed(sender, index, number), residual
            )
            if residual is not None and left is not None:
                residual.copy_(left)
            pieces += [p.contiguous().reshape(-1).view(torch.uint8) for p in payload]
        return torch.cat(pieces)

    def _read(
        self, way: Direction, message: T, like: Values, sender: int, number: int
    ) -> Values:
        """Return the tensors that a ``message`` of :meth:`_message` holds, decompressed, shaped as ``like``."""
        values: Values = {}
        start = 0
        for index, (name, tensor) in enumerate(like.items()):
            payload: list[T] = []
            for shape, dtype in way.compressor.specs(tensor.shape, tensor.dtype):
                stop = start + prod(shape) * dtype.itemsize
                # a copy, as a view of another type needs an aligned start
                payload.append(message[start:stop].clone().view(dtype).view(shape))
                start = stop
            seed = self._seed(sender, index, number)
            decoded = way.compressor.decode(payload, tensor.shape, seed)
            values[name] = decoded.to(tensor.dtype)
        return values

    def _gathered(self, own: T) -> T:
        """Return the messages of all devices ``[devices, bytes]`` on the server; elsewhere this rank's own."""
        if self.mesh.layout.dp == 1:
            return own
        into = None
        if self.serves:
            into = [torch.empty_like(own) for _ in range(self.mesh.layout.dp)]
        else:
            self.sent += own.numel()
        dist.gather(own, into, group_dst=0, group=self.mesh.group("dp"))
        return torch.cat(into) if into else own

    def _broadcast(self, answer: T) -> None:
        if self.mesh.layout.dp > 1:
            if self.serves:
                self.sent += answer.numel() * (self.mesh.layout.dp - 1)
            dist.broadcast(answer, group_src=0, group=self.mesh.group("dp"))


def _mean(tensors: Sequence[T]) -> T:
    """Return the mean of ``tensors``, summed in their order."""
    total = torch.zeros_like(tensors[0])
    for tensor in tensors:
        total += tensor
    return total / len(tensors)
