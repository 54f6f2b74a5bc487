"""GNNPipe: exact with one chunk, equal to its replay to the last bit with more, and the bytes that the formula says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.gnnpipe.model import GNN, Graph, mean_matrix, planted
from examples.gnnpipe.pipeline import GraphPipeline, volumes
from examples.gnnpipe.rows import Rows
from examples.gnnpipe.table import FORWARD, chunk_order, graph_table
from weft.memory.tier_file import TierFile
from weft.prove.pool import ProcessPool
from weft.schedule.actions import ScheduleError, Table, Value
from weft.schedule.lower import SEND
from weft.schedule.simulate import simulate, uniform_costs
from weft.schedule.validate import validate

NODES, HIDDEN, CLASSES = 60, 8, 3


def case(layers: int) -> tuple[Graph, GNN]:
    """A small one-way graph (so that there and back differ), in which some nodes have no neighbour, in float64."""
    graph = planted(NODES, CLASSES, seed=1, degree=6)
    keep = (
        torch.rand(graph.edges.shape[1], generator=torch.Generator().manual_seed(2))
        < 0.5
    )
    graph = Graph(
        graph.features.double(), graph.labels, graph.train, graph.edges[:, keep]
    )
    torch.manual_seed(0)
    return graph, GNN(CLASSES, HIDDEN, CLASSES, layers).double()


def named(model: GNN, layers: Any, what: str) -> dict[str, torch.Tensor]:
    """Values or gradients of the parameters of these layers."""
    found = {
        f"{i}.{n}": p for i in layers for n, p in model.layers[i].named_parameters()
    }
    return {
        n: (p.grad if what == "grad" else p).detach().clone() for n, p in found.items()
    }


def train(
    chunks: int,
    ranks: int,
    layers: int,
    epochs: int,
    seed: int | None = 0,
    world: bool = True,
    folder: str = "",
) -> tuple[list[Any], int]:
    """Losses, gradients and parameters after every epoch, and the bytes that this rank has sent.

    With a ``folder``, features rest in a file there.
    """
    graph, model = case(layers)
    if folder:
        graph = replace(
            graph, features=Rows(graph.features, TierFile(Path(folder)), near=0)
        )
    pipeline = GraphPipeline(
        model, graph, chunks, ranks, dist.group.WORLD if world else None, seed
    )
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.02)
    seen = []
    for _ in range(epochs):
        optimizer.zero_grad()
        loss, grads = pipeline.epoch(), named(model, pipeline.layers, "grad")
        optimizer.step()
        seen.append((loss, grads, named(model, pipeline.layers, "value")))
    return seen, pipeline.wire.bytes_sent if pipeline.wire else 0


def reference(chunks: int, layers: int, epochs: int, seed: int | None) -> list[Any]:
    """The same rule in dense PyTorch, one autograd graph per epoch, constants for chunks that are still to come."""
    graph, model = case(layers)
    mean = mean_matrix(graph, range(NODES), range(NODES)).to_dense()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    cuts = [
        slice(NODES * c // chunks, NODES * (c + 1) // chunks) for c in range(chunks)
    ]
    old: list[torch.Tensor] = [
        torch.zeros(NODES, HIDDEN, dtype=torch.float64) for _ in range(layers)
    ]
    seen = []
    for epoch in range(epochs):
        now = [[h[cut] for cut in cuts] for h in old]
        now[0] = [graph.features[cut] for cut in cuts]
        logits = [torch.empty(0)] * chunks
        for c in chunk_order(chunks, epoch, seed):
            x = now[0][c]
            for i, layer in enumerate(model.layers):
                now[i][c] = x
                x = layer(x, mean[cuts[c]] @ torch.cat(now[i]))
            logits[c] = x
        old = [torch.cat(h).detach() for h in now]
        loss = torch.nn.functional.cross_entropy(
            torch.cat(logits)[graph.train], graph.labels[graph.train]
        )
        optimizer.zero_grad()
        loss.backward()
        grads = named(model, range(layers), "grad")
        optimizer.step()
        seen.append((loss.detach(), grads, named(model, range(layers), "value")))
    return seen


def merged(parts: list[tuple[list[Any], int]]) -> list[Any]:
    """What the ranks saw, as if one had held all layers; the loss must be the same on all."""
    epochs = []
    for seen in zip(*(epochs for epochs, _ in parts), strict=True):
        assert all(torch.equal(loss, seen[0][0]) for loss, *_ in seen)
        epochs.append(
            (
                seen[0][0],
                *({k: v for part in seen for k, v in part[i].items()} for i in (1, 2)),
            )
        )
    return epochs


def compare(got: list[Any], wanted: list[Any], tolerance: float | None) -> None:
    for (loss, *tensors), (wanted_loss, *wanted_tensors) in zip(
        got, wanted, strict=True
    ):
        pairs = [(loss, wanted_loss)]
        for mine, theirs in zip(tensors, wanted_tensors, strict=True):
            assert mine.keys() == theirs.keys()
            pairs += [(mine[k], theirs[k]) for k in mine]
        for a, b in pairs:
            assert (
                torch.equal(a, b)
                if tolerance is None
                else torch.allclose(a, b, rtol=0, atol=tolerance)
            )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ranks", "layers"), [(1, 3), (2, 2), (2, 5), (4, 4), (4, 6)])
def test_one_chunk_is_full_graph_training(
    pool: ProcessPool, ranks: int, layers: int
) -> None:
    graph, model = case(layers)
    loss = torch.nn.functional.cross_entropy(
        model(graph)[graph.train], graph.labels[graph.train]
    )
    wanted = reference(1, layers, 3, None)
    assert abs(loss - wanted[0][0]) < 1e-12
    compare(merged(pool.run(ranks, train, 1, ranks, layers, 3)), wanted, 1e-10)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("chunks", [2, 3, 8])
def test_chunks_equal_the_replay_to_the_last_bit(
    pool: ProcessPool, ranks: int, chunks: int
) -> None:
    layers, epochs = 5, 4
    parts = pool.run(ranks, train, chunks, ranks, layers, epochs)
    (replayed,) = pool.run(1, train, chunks, ranks, layers, epochs, 0, False)
    compare(merged(parts), replayed[0], None)
    graph, _ = case(layers)
    volume = volumes(graph, ranks, HIDDEN, layers)[0]
    assert volume == 2 * (ranks - 1) * NODES * HIDDEN * 8
    assert sum(sent for _, sent in parts) == epochs * volume


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("chunks", [2, 3, 8])
def test_the_stale_rule_is_what_autograd_makes_of_it(
    pool: ProcessPool, chunks: int, seed: int | None
) -> None:
    (replayed,) = pool.run(1, train, chunks, 2, 5, 4, seed, False)
    compare(replayed[0], reference(chunks, 5, 4, seed), 1e-10)


def test_stale_reads_change_the_gradient() -> None:
    one, many = reference(1, 4, 1, None)[0], reference(4, 4, 1, None)[0]
    assert abs(one[0] - many[0]) > 1e-4


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_table(ranks: int, chunks: int) -> None:
    table = graph_table(ranks, chunk_order(chunks, 0, 7))
    lowered = validate(table)
    sends = [a for a in lowered if a.kind == SEND]
    assert not [a for a in sends if a.reads[0].name not in ("act", "grad")]
    assert len(sends) == 2 * (ranks - 1) * chunks
    clock = simulate(table, uniform_costs(table))  # forward 1, backward 2
    assert clock.elapsed == 3 * (chunks + ranks - 1)
    assert clock.peaks == (chunks,) * ranks
    validate(graph_table(ranks, range(chunks), backward=False))


def test_a_chunk_reads_its_neighbours_only() -> None:
    table = graph_table(2, [2, 0, 1], {0: {0, 2}, 1: {1}, 2: {0}})
    read = {
        a.microbatch: {v.microbatch for v in a.reads if v.name == "layer_in"}
        for a in table
        if a.kind == FORWARD
    }
    assert read == {2: set(), 0: {2}, 1: set()}


def test_backward_in_the_order_of_forward_is_refused() -> None:
    table = graph_table(1, [0, 1, 2])
    (actions,) = table.ranks
    wrong = Table(
        table.name, ((*actions[:3], *reversed(actions[3:])),), table.stages, table.paths
    )
    assert Value("late", 0, 1) in actions[-1].reads
    with pytest.raises(
        ScheduleError, match=r"GB\(0,0\) on rank 0 comes before late\(0,1\) is there"
    ):
        validate(wrong)


def test_orders_are_seeded_permutations() -> None:
    orders = [chunk_order(8, epoch, 3) for epoch in range(4)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert len(set(map(tuple, orders))) > 1 and orders[1] == chunk_order(8, 1, 3)
    assert chunk_order(3, 5, None) == [0, 1, 2]


def test_features_in_a_file_change_no_bit(pool: ProcessPool, tmp_path: Path) -> None:
    for world, ranks in ((False, 1), (True, 2)):
        found = pool.run(ranks, train, 3, ranks, 4, 3, 0, world, str(tmp_path))
        compare(
            merged(found),
            merged(pool.run(ranks, train, 3, ranks, 4, 3, 0, world)),
            None,
        )
    graph, model = case(2)
    rows = Rows(graph.features, TierFile(tmp_path), near=0)
    GraphPipeline(model, replace(graph, features=rows), 3, 1).epoch()
    assert (
        rows.bytes["asked"] > graph.features.numel() * 8
        and rows.bytes["read"] == rows.bytes["touched"]
    )


def test_volumes_by_hand() -> None:
    # Nodes 0, 1 | 2, 3. Rank 1 needs node 0 (twice, got once) and 1; rank 0 needs node 3.
    edges = torch.tensor([[0, 0, 1, 3, 0, 2], [2, 3, 3, 1, 1, 3]])
    graph = Graph(
        torch.zeros(4, 2), torch.zeros(4), torch.ones(4, dtype=torch.bool), edges
    )
    assert volumes(graph, 2, hidden=5, layers=3) == (
        1 * 4 * 2 * 5 * 4,
        2 * 3 * 2 * 5 * 4,
    )
    assert volumes(graph, 1, hidden=5, layers=3) == (0, 0)


def learn(chunks: int) -> tuple[float, float]:
    """Test accuracy after 80 epochs on four stages, as the pipeline says and as the model says."""
    graph = planted(2000, 6, seed=0)
    torch.manual_seed(0)
    model = GNN(6, 32, 6, 4)
    pipeline = GraphPipeline(model, graph, chunks, 4)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=5e-3)
    for _ in range(80):
        optimizer.zero_grad()
        pipeline.epoch()
        optimizer.step()
    right = (model(graph).argmax(1) == graph.labels)[~graph.train]
    return pipeline.accuracy(), right.double().mean().item()


@pytest.mark.soak
@pytest.mark.slow
def test_it_learns_as_well_as_full_graph_training(pool: ProcessPool) -> None:
    # In a worker, which has one thread: two would wait for each other on a busy machine.
    (full,), (chunked,) = pool.run(1, learn, 1), pool.run(1, learn, 8)
    for pipeline, model in (full, chunked):
        assert pipeline == pytest.approx(model, abs=1e-3)
    assert full[0] > 0.95
    assert abs(full[0] - chunked[0]) < 0.02
