"""DADAO (Nabli & Oyallon 2023): a convex sum minimised by nodes that have gradients and neighbours at random times.

Every node computes gradients by a Poisson clock of its own, every edge of the graph exchanges by another; nobody waits
for a round. Between its events a node's state follows a linear differential equation, which is what accelerates, and is
solved exactly when the next event comes. One :class:`Node` does it all. It runs in a simulation (:func:`simulate`) and
as a process of its own that talks to its neighbours over sockets (:func:`run`). Clocks are drawn from a seed that all
know, so a run equals the simulation to the last bit, however fast its processes are. :func:`extra` is synchronous
gossip, to compare with. Run ``python -m examples.dadao``.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Gradient = Callable[[Array], Array]
#: Edges between nodes 0, 1, ...
Graph = Sequence[tuple[int, int]]
#: Rows of a node's state ``[6, dimension]``.
X, X_TILDE, Y, Y_TILDE, Z, Z_TILDE = range(6)


class Event(NamedTuple):
    """One node computes a gradient, or two exchange."""

    time: float
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Method:
    """The method's constants for functions with curvature from ``strong`` to ``smooth`` on a graph."""

    strong: float
    smooth: float
    graph: Graph

    @property
    def nodes(self) -> int:
        return 1 + max(max(edge) for edge in self.graph)

    @cached_property
    def _contrast(self) -> tuple[float, float]:
        """Of the graph with one exchange per unit of time: how slowly it mixes, and its worst edge's resistance."""
        laplacian = np.zeros((self.nodes, self.nodes))
        for i, j in self.graph:
            laplacian[[i, j, i, j], [i, j, j, i]] += np.array([1, 1, -1, -1]) / len(
                self.graph
            )
        inverse = np.linalg.pinv(laplacian)
        return 1 / np.linalg.eigvalsh(laplacian)[1], max(inverse[i, i] + inverse[j, j] - 2 * inverse[i, j]
                                                         for i, j in self.graph) / 2  # fmt: skip

    @property
    def exchanges(self) -> float:
        """Of all edges, in the time in which a node computes one gradient on average."""
        mixing, resistance = self._contrast
        return float(np.sqrt(2 * mixing * resistance))

    @cached_property
    def _root(self) -> float:
        return float(np.sqrt(self.strong / 2 / self.smooth))

    @property
    def shift(self) -> float:
        return self.strong / 2

    def steps(self) -> dict[int, float]:
        """By how much each row of the state follows the residual of a gradient."""
        return {
            X: -1 / (4 * self.smooth),
            X_TILDE: -1 / (4 * self.smooth * self._root),
            Y_TILDE: 1 + self._root / 4,
        }

    def pulls(self) -> dict[int, float]:
        """By how much each row follows the difference to a neighbour."""
        return {Z: -0.5, Z_TILDE: -2 * self._contrast[0] / self.exchanges / self._root}

    @cached_property
    def _flow(
        self,
    ) -> tuple[NDArray[np.complex128], NDArray[np.complex128], NDArray[np.complex128]]:
        """Eigenvalues and vectors of the equation between events, and the vectors' inverse."""
        root, pull = self._root, 1 / (2 * self._root)
        matrix = np.zeros((6, 6))
        matrix[X, [X, X_TILDE]] = -root / 8, root / 8
        matrix[X_TILDE, [X, X_TILDE]] = root / 8, -root / 8
        matrix[Y, [Y, Y_TILDE]] = -root / 4, root / 4
        matrix[Y_TILDE, [X_TILDE, Y, Z]] = -pull * self.shift, -pull, -pull
        matrix[Z, [Z, Z_TILDE]] = -root / 4, root / 4
        matrix[Z_TILDE, [Z, Z_TILDE]] = root / 8, -root / 8
        values, vectors = np.linalg.eig(matrix.astype(complex))
        return values, vectors, np.linalg.inv(vectors)

    def flow(self, time: float) -> Array:
        """The matrix ``[6, 6]`` by which a state changes in this time."""
        values, vectors, inverse = self._flow
        return ((vectors * np.exp(values * time)) @ inverse).real

    def events(self, seed: int, horizon: float) -> Iterator[Event]:
        """What happens before the ``horizon``: all clocks are one, whose every tick is somebody's."""
        random, time = np.random.default_rng(seed), 0.0
        while (
            time := time + random.exponential(1 / (self.nodes + self.exchanges))
        ) < horizon:
            if random.random() * (self.nodes + self.exchanges) < self.nodes:
                yield Event(time, (int(random.integers(self.nodes)),))
            else:
                yield Event(time, self.graph[int(random.integers(len(self.graph)))])


@dataclass
class Node:
    """A node's state, as it was at ``time``."""

    method: Method
    gradient: Gradient
    state: Array
    time: float = 0.0

    def _advance(self, time: float) -> None:
        self.state = self.method.flow(time - self.time) @ self.state
        self.time = time

    def compute(self, time: float) -> None:
        self._advance(time)
        residual = (
            self.gradient(self.state[X])
            - self.method.shift * self.state[X]
            - self.state[Y_TILDE]
        )
        for row, step in self.method.steps().items():
            self.state[row] += step * residual

    def told(self, time: float) -> Array:
        """What a neighbour is told in an exchange."""
        self._advance(time)
        return self.state[Y] + self.state[Z]

    def hear(self, own: Array, other: Array) -> None:
        for row, pull in self.method.pulls().items():
            self.state[row] += pull * (own - other)


@dataclass
class Course:
    """How far all nodes were from the optimum after so many gradients and exchanges, all nodes and edges together."""

    gradients: list[int] = field(default_factory=list)
    exchanges: list[int] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)

    def add(self, gradients: int, exchanges: int, apart: float) -> None:
        self.gradients.append(gradients)
        self.exchanges.append(exchanges)
        self.apart.append(apart)

    def until(self, apart: float) -> tuple[int, int]:
        """Gradients and exchanges from which on all nodes stay nearer than that."""
        last = max(
            (i for i, found in enumerate(self.apart) if found > apart), default=-1
        )
        if last + 1 == len(self.apart):
            raise ValueError(f"still {self.apart[-1]:.2g} apart at the end")
        return self.gradients[last + 1], self.exchanges[last + 1]


def simulate(
    method: Method, gradients: Sequence[Gradient], size: int, seed: int, horizon: float,
    apart: Callable[[Array], float] | None = None,
) -> tuple[Array, Course]:  # fmt: skip
    """All nodes in this process, one event after the other: their states in the end, ``[nodes, 6, size]``.

    ``apart`` says how far nodes' ``x`` of shape ``[nodes, size]`` are from the optimum.
    """
    nodes = [Node(method, gradient, np.zeros((6, size))) for gradient in gradients]
    course, computed, exchanged = Course(), 0, 0
    for number, (time, who) in enumerate(method.events(seed, horizon)):
        if len(who) == 1:
            nodes[who[0]].compute(time)
            computed += 1
        else:
            one, other = (nodes[i] for i in who)
            mine, theirs = one.told(time), other.told(time)
            one.hear(mine, theirs)
            other.hear(theirs, mine)
            exchanged += 1
        if apart and number % 50 == 0:
            course.add(
                computed, exchanged, apart(np.stack([node.state[X] for node in nodes]))
            )
    return np.stack([node.state for node in nodes]), course


def take_part(
    node: Node, rank: int, seed: int, horizon: float, links: dict[int, Connection]
) -> int:
    """Live through all events of this node; exchanges are messages over ``links``. How many bytes were sent."""
    sent = 0
    for time, who in node.method.events(seed, horizon):
        if who == (rank,):
            node.compute(time)
        elif rank in who:
            link, mine = links[sum(who) - rank], node.told(time)
            link.send_bytes(mine.tobytes())
            node.hear(mine, np.frombuffer(link.recv_bytes(mine.nbytes)))
            sent += mine.nbytes
    return sent


def _process(
    rank: int, method: Method, gradient: Gradient, size: int, seed: int, horizon: float,
    links: dict[int, Connection], answer: Connection,
) -> None:  # fmt: skip
    node = Node(method, gradient, np.zeros((6, size)))
    sent = take_part(node, rank, seed, horizon, links)
    answer.send_bytes(np.append(node.state.ravel(), float(sent)).tobytes())


def run(
    method: Method,
    gradients: Sequence[Gradient],
    size: int,
    seed: int,
    horizon: float,
    limit: float = 60.0,
) -> tuple[Array, int]:
    """Every node as a process that talks to its neighbours only: states as of :func:`simulate`, and all bytes sent."""
    context = multiprocessing.get_context("spawn")
    links: list[dict[int, Connection]] = [{} for _ in gradients]
    for i, j in method.graph:
        links[i][j], links[j][i] = context.Pipe()
    answers = [context.Pipe(duplex=False) for _ in gradients]
    processes = [
        context.Process(
            target=_process,
            args=(i, method, gradient, size, seed, horizon, links[i], answers[i][1]),
        )
        for i, gradient in enumerate(gradients)
    ]
    try:
        for process in processes:
            process.start()
        for _, writer in answers:
            writer.close()  # so that a node that dies is noticed
        states, sent = [], 0
        for i, (reader, _) in enumerate(answers):
            if not reader.poll(limit):
                raise TimeoutError(
                    f"node {i} has not come to its end within {limit:g} s"
                )
            *state, own = np.frombuffer(reader.recv_bytes())
            states.append(np.reshape(state, (6, size)))
            sent += int(own)
    finally:
        for process in processes:
            process.kill()
    return np.stack(states), sent


def extra(
    gradients: Sequence[Gradient],
    graph: Graph,
    size: int,
    step: float,
    rounds: int,
    apart: Callable[[Array], float],
) -> Course:
    """Synchronous gossip that ends at the optimum (EXTRA, Shi et al. 2015): in a round all compute, and exchange."""
    count = len(gradients)
    mixing = np.eye(count)
    degree = np.bincount(np.ravel(graph), minlength=count)
    for i, j in graph:  # Metropolis weights
        weight = 1 / (1 + max(degree[i], degree[j]))
        mixing[[i, j, i, j], [i, j, j, i]] += np.array(
            [-weight, -weight, weight, weight]
        )
    course, before = Course(), np.zeros((count, size))
    slopes = np.stack([g(x) for g, x in zip(gradients, before, strict=True)])
    now = mixing @ before - step * slopes
    for number in range(2, rounds):
        new_slopes = np.stack([g(x) for g, x in zip(gradients, now, strict=True)])
        after = (
            now
            + mixing @ now
            - (before + mixing @ before) / 2
            - step * (new_slopes - slopes)
        )
        before, now, slopes = now, after, new_slopes
        course.add(number * count, number * len(graph), apart(now))
    return course


# --- a problem: logistic regression, every node with samples of its own


@dataclass(frozen=True)
class Logistic:
    """The gradient of a node's loss: samples ``rows`` multiplied by their labels, and a little weight decay."""

    rows: Array
    decay: float

    def __call__(self, x: Array) -> Array:
        return self.decay * x - (self.rows / (1 + np.exp(self.rows @ x))[:, None]).mean(
            0
        )

    def loss(self, x: Array) -> float:
        return float(np.logaddexp(0, -self.rows @ x).mean() + self.decay / 2 * x @ x)

    @property
    def smooth(self) -> float:
        return float(
            np.linalg.eigvalsh(self.rows.T @ self.rows / len(self.rows))[-1] / 4
            + self.decay
        )


class Problem(NamedTuple):
    """``apart``: the mean over nodes of how far the loss of all at their ``x [nodes, size]`` is from the least."""

    gradients: list[Logistic]
    apart: Callable[[Array], float]


def problem(
    nodes: int = 8, size: int = 10, seed: int = 0, decay: float = 0.002
) -> Problem:
    """Nodes whose samples differ, with features of scales from 1 to 1/30: as hard as its constants say."""
    random = np.random.default_rng(seed)
    truth = random.normal(size=size) * np.logspace(0, 1.5, size)
    found = []
    for _ in range(nodes):
        rows = (
            random.normal(size=(30, size)) + random.normal(size=size)
        ) * np.logspace(0, -1.5, size)
        found.append(
            Logistic(
                rows * np.sign(rows @ truth + random.normal(size=30))[:, None], decay
            )
        )
    whole = Logistic(np.concatenate([one.rows for one in found]), decay)
    best = np.zeros(size)
    for _ in range(100):  # Newton's method
        weight = 1 / (1 + np.exp(whole.rows @ best))
        curve = (whole.rows * (weight * (1 - weight))[:, None]).T @ whole.rows / len(
            whole.rows
        ) + decay * np.eye(size)
        best -= np.linalg.solve(curve, whole(best))
    least = whole.loss(best)
    return Problem(
        found, lambda x: float(np.mean([whole.loss(own) for own in x]) - least)
    )


def ring(nodes: int) -> Graph:
    return [(i, (i + 1) % nodes) for i in range(nodes)]


def main() -> None:
    gradients, apart = problem()
    graph, smooth = ring(8), max(one.smooth for one in gradients)
    method = Method(gradients[0].decay, smooth, graph)
    print(
        f"condition number {smooth / method.strong:.0f}, {method.exchanges:.2f} exchanges with 8 gradients"
    )
    _, course = simulate(method, gradients, 10, seed=0, horizon=1700, apart=apart)
    print("DADAO to 1e-6: {} gradients, {} exchanges".format(*course.until(1e-6)))
    for share in (1.0, 1.25, 1.4):
        try:
            found = extra(gradients, graph, 10, share / smooth, 4_000, apart).until(
                1e-6
            )
        except ValueError as error:
            print(f"synchronous gossip, step {share}/L: {error}")
        else:
            print(
                "synchronous gossip, step {}/L: {} gradients, {} exchanges".format(
                    share, *found
                )
            )


if __name__ == "__main__":
    main()
