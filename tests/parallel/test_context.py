"""Every table of tiles against attention on one device: values, gradients, bytes, and what it refuses."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bench.modelled import critical_path, work_per_step
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.sequence import chunk_owners, owned_ranges, padded_length
from weft.models.attention import attend_forward, attention
from weft.net.groups import fake_rank
from weft.parallel.build import check_fits
from weft.parallel.context.attend import context_attention
from weft.parallel.context.heads import head_index, head_ranges
from weft.parallel.context.tables import (
    TableError,
    Tile,
    TileTable,
    tile_table_of,
    validate_tiles,
)
from weft.parallel.context.tile_attention import (
    Trip,
    tile_attention,
    tile_pieces,
    trip_of,
)
from weft.recipe import ModelShape
from weft.registry import names
from weft.techniques.context.rsa.operator import ring_self_attention

EXECUTE = "weft.parallel.context.tile_attention"
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
#: name: context and ulysses of the layout; of the last ones the second is half of cp.
SCHEMES = names("context")
WAYS = [(scheme, 1) for scheme in SCHEMES] + [
    ("ulysses", 1),
    ("zigzag", 2),
    ("lightseq", 2),
    ("tokenring", 2),
]


def whole(
    rows: int, length: int, heads: tuple[int, int], dtype: torch.dtype
) -> list[torch.Tensor]:
    """q, k, v and a gradient of the output, ``[rows, length, heads or kv_heads, 8]``; the same on every rank."""
    generator = torch.Generator().manual_seed(length)
    sizes = (heads[0], heads[1], heads[1], heads[0])
    return [
        torch.randn(rows, length, n, 8, generator=generator, dtype=torch.float64).to(
            dtype
        )
        for n in sizes
    ]


def bounds(documents: list[list[int]]) -> torch.Tensor:
    return (
        torch.tensor([0, *[n for row in documents for n in row]])
        .cumsum(0)
        .to(torch.int32)
    )


def one_device(
    tensors: list[torch.Tensor], cu: torch.Tensor, window: int = 0
) -> list[torch.Tensor]:
    """Output and gradients of q, k and v."""
    q, k, v = (x.clone().requires_grad_() for x in tensors[:3])
    out = attention(q, k, v, cu, window)[0]
    out.backward(tensors[3])
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return [out.detach(), q.grad, k.grad, v.grad]


class Sent:
    """Counts the elements that this rank sends point to point."""

    def __init__(self) -> None:
        self.elements = 0
        self.real = dist.P2POp

    def __call__(self, op: Any, tensor: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
        self.elements += tensor.numel() if op is dist.isend else 0
        return self.real(op, tensor, *rest, **kwargs)


def cut_case(
    scheme: str, documents: list[list[int]], lengths: list[int], heads: tuple[int, int], dtype: torch.dtype,
    window: int = 0,
) -> tuple[float, int, int]:  # fmt: skip
    """On every rank: blocks of any ``lengths`` against one device. Largest error; sent forward and backward."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cu, tensors = bounds(documents), whole(len(documents), sum(lengths), heads, dtype)
    starts = [sum(lengths[:b]) for b in range(len(lengths))]
    mine = [
        (starts[b], starts[b] + lengths[b])
        for b in tile_table_of(scheme, world).owners[rank]
    ]
    q, k, v, grad = (torch.cat([x[:, a:b] for a, b in mine], 1) for x in tensors)
    for x in (q, k, v):
        x.requires_grad_()
    with mock.patch("torch.distributed.P2POp", Sent()) as sent:
        if scheme == "rsa":
            out, kept = ring_self_attention(
                q, k, v, cu, list(range(world)), rank, lengths, window
            )
            # tokens^2 / ranks scores
            assert kept.shape == (len(documents), heads[0], q.shape[1], sum(lengths))
        else:
            out, kept = tile_attention(
                q, k, v, cu, scheme, list(range(world)), rank, lengths, window
            )
            assert kept.shape == (q.shape[0] * q.shape[1], heads[0])
        forward = sent.elements
        out.backward(grad)
    found = [out.detach(), q.grad, k.grad, v.grad]
    expected = [
        torch.cat([x[:, a:b] for a, b in mine], 1)
        for x in one_device(tensors, cu, window)
    ]
    worst = max(
        (
            (a - b).abs().max().item()
            for a, b in zip(found, expected, strict=True)
            if a.numel()
        ),
        default=0.0,
    )
    return worst, forward, sent.elements - forward


def cut_cases(cases: list[tuple[Any, ...]]) -> list[tuple[float, int, int]]:
    return [cut_case(*case) for case in cases]


def layout_cases(
    cases: list[tuple[str, int, list[list[int]], tuple[int, int], int]],
    dtype: torch.dtype = torch.float64,
) -> list[float]:
    """On every rank: the attention that a layout builds, against one device; the largest error of each case."""
    world, found = dist.get_world_size(), []
    for context, ulysses, documents, heads, window in cases:
        layout = Layout(cp=world, context=context, ulysses=ulysses)
        mesh = Mesh.create(layout, "cpu")
        attend = context_attention(
            mesh, ModelShape(heads=heads[0], kv_heads=heads[1], head_dim=8)
        )
        length = sum(documents[0])
        cu, tensors = bounds(documents), whole(len(documents), length, heads, dtype)
        mine = owned_ranges(length, layout, mesh.rank("cp"))
        q, k, v, grad = (torch.cat([x[:, a:b] for a, b in mine], 1) for x in tensors)
        for x in (q, k, v):
            x.requires_grad_()
        out = attend(q, k, v, cu, window)
        out.backward(grad)
        expected = [
            torch.cat([x[:, a:b] for a, b in mine], 1)
            for x in one_device(tensors, cu, window)
        ]
        pairs = zip((out.detach(), q.grad, k.grad, v.grad), expected, strict=True)
        found.append(max((a - b).abs().max().item() for a, b in pairs))
    return found


@st.composite
def packed(draw: st.DrawFn, length: int) -> list[list[int]]:
    """One or two rows of ``length`` tokens, each of documents of any lengths; half of them as short as can be."""
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        row: list[int] = []
        while sum(row) < length:
            row.append(
                min(length - sum(row), draw(st.sampled_from([1, 1, 2, 3, 7, 20, 60])))
            )
        rows.append(row)
    return rows


HEADS = [(2, 2), (4, 2), (6, 1), (3, 1)]


@st.composite
def cut_blocks(draw: st.DrawFn, world: int) -> list[tuple[Any, ...]]:
    """For every scheme: blocks of any lengths, some of none, so that ranks may own nothing, under any documents."""
    cases = []
    for scheme in SCHEMES:
        blocks = len(tile_table_of(scheme, world).owner)
        lengths = draw(
            st.lists(
                st.sampled_from([0, 0, 1, 2, 5, 9, 16]),
                min_size=blocks,
                max_size=blocks,
            )
        )
        if not sum(lengths):
            lengths[draw(st.integers(0, blocks - 1))] = 1
        documents = draw(packed(sum(lengths)))
        dtype = draw(st.sampled_from(list(TOLERANCE)))
        window = draw(st.sampled_from([0, 0, 1, 5, 17, 40]))
        cases.append(
            (scheme, documents, lengths, draw(st.sampled_from(HEADS)), dtype, window)
        )
    return cases


def check_cut(pool: Any, world: int, cases: list[tuple[Any, ...]]) -> None:
    answers = pool.run(world, cut_cases, cases)
    for number, case in enumerate(cases):
        assert max(answer[number][0] for answer in answers) < TOLERANCE[case[4]], case


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [2, 3, 4, pytest.param(8, marks=pytest.mark.soak)])
def test_every_table_equals_one_device(pool: Any, world: int) -> None:
    @settings(
        max_examples=5,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(cut_blocks(world))
    def check(cases: list[tuple[Any, ...]]) -> None:
        check_cut(pool, world, cases)

    check()


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_table_equals_one_device_many_times(pool: Any, world: int) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(cut_blocks(world))
    def check(cases: list[tuple[Any, ...]]) -> None:
        check_cut(pool, world, cases)

    check()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("world", "most"), [
    (2, 4), (3, 4), (4, 2), *(pytest.param(*c, marks=pytest.mark.soak) for c in ((4, 4), (8, 1), (8, 2))),
])  # fmt: skip
def test_every_way_to_lay_attention_over_ranks(
    pool: Any, world: int, most: int
) -> None:
    """Ulysses and USP too, with head counts that nothing divides and fewer key/value heads than ranks."""
    cases = []
    for context, ulysses in WAYS:
        layout = Layout(cp=world, context=context, ulysses=ulysses)
        heads = (
            [(4, 2), (5, 1), (6, 3), (7, 7)]
            if layout.head_ranks <= 4
            else [(8, 2), (9, 1), (12, 3)]
        )
        if world % layout.head_ranks:
            continue
        for i, shape in enumerate(heads[:most]):
            length = padded_length(61 + i, layout)
            cases.append(
                (
                    context,
                    ulysses,
                    [[length], [1, 7, length - 9, 1]][i % 2 :],
                    shape,
                    13 * (i % 2),
                )
            )
    answers = pool.run(world, layout_cases, cases)
    for number, case in enumerate(cases):
        assert max(answer[number] for answer in answers) < 1e-10, case


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s != "rsa"])
def test_moves_are_under_way_while_tiles_are_computed(scheme: str) -> None:
    """On a rank whose messages go nowhere: what a step needs is asked for before the tiles of the step before it."""
    seen: list[str] = []

    class Work:
        def wait(self) -> None:
            seen.append("wait")

    def post(ops: list[Any]) -> list[Work]:
        seen.append("post")
        return [Work()]

    def tile(*args: Any) -> Any:
        seen.append("tile")
        return attend_forward(*args)

    with fake_rank(0, 4):
        q = torch.zeros(1, 8, 2, 8)
        cu = torch.tensor([0, 32], dtype=torch.int32)
        with (
            mock.patch("torch.distributed.batch_isend_irecv", post),
            mock.patch(f"{EXECUTE}.attend_forward", tile),
        ):
            tile_attention(q, q, q, cu, scheme, [0, 1, 2, 3], 0, [])
    steps = "".join(word[0] for word in seen)  # p: post, t: tile, w: wait
    assert steps.startswith("pt") and re.fullmatch("(pt*w|t+)+", steps)
    # the last results go home alone
    assert steps.count("p") <= tile_table_of(scheme, 4).steps + 1


def in_bfloat16(scheme: str, length: int) -> tuple[list[float], list[float]]:
    """On every rank: largest errors of output and gradients, over several ranks and on one, against float64."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout, cu = (
        Layout(cp=world, context=scheme),
        torch.tensor([0, length], dtype=torch.int32),
    )
    attend = context_attention(
        Mesh.create(layout, "cpu"), ModelShape(heads=4, kv_heads=2)
    )
    tensors = [x.bfloat16() for x in whole(1, length, (4, 2), torch.float64)]
    mine = owned_ranges(length, layout, rank)
    q, k, v, grad = (torch.cat([x[:, a:b] for a, b in mine], 1) for x in tensors)
    for x in (q, k, v):
        x.requires_grad_()
    out = attend(q, k, v, cu)
    out.backward(grad)
    one, exact = one_device(tensors, cu), one_device([x.double() for x in tensors], cu)
    share = [torch.cat([x[:, a:b] for a, b in mine], 1) for x in exact]
    pairs = zip((out.detach(), q.grad, k.grad, v.grad), share, strict=True)
    return [(a - b).abs().max().item() for a, b in pairs], [
        (a - b).abs().max().item() for a, b in zip(one, exact, strict=True)
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scheme", ["zigzag", "tokenring", "rsa"])
def test_many_ranks_are_as_exact_as_one_in_bfloat16(pool: Any, scheme: str) -> None:
    """Parts are joined and gradients summed in float32, so that errors do not grow with the number of ranks."""
    for several, one in pool.run(8, in_bfloat16, scheme, 256):
        assert all(a <= 1.5 * b for a, b in zip(several, one, strict=True)), (
            several,
            one,
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s != "gather"])
def test_blocks_outside_the_window_do_not_travel(pool: Any, scheme: str) -> None:
    """Of eight blocks or more, a window that reaches into the one before leaves fewer keys to send."""
    blocks = len(tile_table_of(scheme, 8).owner)
    cases = [
        (scheme, [[8 * blocks]], [8] * blocks, (2, 2), torch.float64, window)
        for window in (0, 9)
    ]
    answers = pool.run(8, cut_cases, cases)
    all_sent, few = (sum(answer[i][1] for answer in answers) for i in (0, 1))
    assert few < (0.8 if scheme == "rsa" else 0.6) * all_sent


def closed_form(
    scheme: str, ranks: int, tokens: int, d: int, kv: int, heads: int
) -> tuple[float, float]:
    """Elements that all ranks send for one document, forward and backward: formulas of docs/reference/techniques.md."""
    share = tokens / ranks
    if scheme in ("ring", "rsa"):
        return (ranks - 1) * tokens * kv, 2 * (ranks - 1) * tokens * kv
    if scheme in ("zigzag", "gather"):
        return 1.5 * (ranks - 1) * tokens * kv, 3 * (ranks - 1) * tokens * kv
    if scheme == "tokenring":
        rounds = 0.75 * (ranks - 1) * tokens
        return rounds * (2 * d + heads), rounds * (4 * d + heads)
    half, odd = ranks // 2, ranks % 2
    keys, queries = (
        half * ranks - half * (half + 1) / 2,
        half * (half + (1 if odd else -1)) / 2,
    )
    forward = keys * share * 2 * kv + queries * share * (2 * d + heads)
    return forward, keys * share * 4 * kv + queries * share * (4 * d + heads)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_executed_elements_are_those_of_the_formula(pool: Any, world: int) -> None:
    length = 16 * world
    lengths = {
        s: [length // len(tile_table_of(s, world).owner)]
        * len(tile_table_of(s, world).owner)
        for s in SCHEMES
    }
    cases = [(s, [[length]] * 2, lengths[s], (4, 2), torch.float32) for s in SCHEMES]
    answers = pool.run(world, cut_cases, cases)
    for number, scheme in enumerate(SCHEMES):
        for which in (0, 1):
            sent = sum(answer[number][1 + which] for answer in answers)
            assert sent == closed_form(scheme, world, 2 * length, 32, 16, 4)[which]


def test_documents_that_do_not_cross_ranks_send_nothing(pool: Any) -> None:
    counts = {scheme: len(tile_table_of(scheme, 4).owner) for scheme in SCHEMES}
    cases = [
        (scheme, [[8] * 8], [64 // blocks] * blocks, (2, 2), torch.float32)
        for scheme, blocks in counts.items()
    ]
    for answer in pool.run(4, cut_cases, cases):
        assert [sent for _, *sent in answer] == [[0, 0]] * len(SCHEMES)


@pytest.mark.parametrize("ranks", [*range(1, 10), 16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_tile_is_there_once(scheme: str, ranks: int) -> None:
    table = tile_table_of(scheme, ranks)
    blocks = len(table.owner)
    assert {(t.q, t.k) for t in table.tiles} == {
        (q, k) for q in range(blocks) for k in range(q + 1)
    }
    assert len(table.tiles) == blocks * (blocks + 1) // 2
    assert (
        list(table.owners) == chunk_owners(Layout(cp=ranks, context=scheme))
        or ranks == 1
    )


def test_critical_paths() -> None:
    """The figures of docs/measured/sequence-balance.png: tiles of (tokens / ranks)^2 on the path, ideal ranks / 2."""
    for ranks in (2, 3, 4, 5, 7, 8, 9, 16):
        for scheme in ("zigzag", "tokenring", "gather"):
            assert critical_path(tile_table_of(scheme, ranks)) == ranks / 2
        assert (
            critical_path(tile_table_of("ring", ranks))
            == critical_path(tile_table_of("rsa", ranks))
            == ranks - 0.5
        )
        assert critical_path(tile_table_of("lightseq", ranks)) == ranks / 2 + (
            0 if ranks % 2 else 0.5
        )
    for scheme in SCHEMES:
        assert sum(map(sum, work_per_step(tile_table_of(scheme, 8)))) == 32


def test_ulysses_and_tables_share_a_sequence() -> None:
    """USP on 2 x 2: each pair of neighbours holds, in rank order, what its table rank owns."""
    layout = Layout(cp=4, context="zigzag", ulysses=2)
    assert chunk_owners(layout) == [(0, 1), (6, 7), (2, 3), (4, 5)]
    assert chunk_owners(Layout(cp=4, context="ulysses")) == [(0,), (1,), (2,), (3,)]
    assert chunk_owners(Layout(cp=6, context="zigzag", ulysses=3))[:3] == [
        (0, 1),
        (2, 9),
        (10, 11),
    ]


def test_heads_are_dealt_as_they_come() -> None:
    assert head_ranges(6, 3, 4) == ([0, 2, 2, 4, 4, 5, 5, 6], [0, 1, 1, 2, 2, 3, 2, 3])
    assert head_index(6, 3, 4, 0) is None
    # five query heads on two key/value heads
    assert head_index(9, 3, 2, 0) == [0, 0, 0, 1, 1]


def spoiled() -> dict[str, tuple[TileTable, str]]:
    table = tile_table_of("ring", 3)
    tiles = table.tiles
    last = tiles[-1]
    return {
        "missing": (
            replace(table, tiles=tiles[1:]),
            r"1 tiles are missing, the first is \(query 0, key 0\)",
        ),
        "doubled": (
            replace(table, tiles=(*tiles, last._replace(step=9))),
            r"tile \(query 2, key 0\) is doubled",
        ),
        "more ranks than blocks": (
            replace(table, owners=(*table.owners, ())),
            "3 blocks for 4 ranks: rank 3 has none",
        ),
        "owned twice": (
            replace(table, owners=((0,), (1,), (1,))),
            "not each of 0 to 2 once",
        ),
        "future": (
            replace(table, tiles=(*tiles[:-1], Tile(2, 2, 0, 2, "full"))),
            "no tile of causal attention",
        ),
        "mask": (
            replace(table, tiles=(*tiles[:-1], last._replace(mask="causal"))),
            "wrong mask",
        ),
        "no such rank": (
            replace(table, tiles=(*tiles[:-1], last._replace(rank=5))),
            "on no rank of 3",
        ),
        "buffers": (
            replace(table, buffers=1),
            "holds 2 visiting blocks at step 1, not 1",
        ),
    }


@pytest.mark.parametrize("case", spoiled())
def test_spoiled_tables_are_refused(case: str) -> None:
    table, message = spoiled()[case]
    with pytest.raises(TableError, match=message):
        validate_tiles(table)


def test_bad_input_is_refused_before_any_rank_computes() -> None:
    table = tile_table_of("zigzag", 2)
    with pytest.raises(UsageError, match="document 1 of the batch has 0 tokens"):
        Trip(table, (0, 4, 4, 8), (2, 2, 2, 2), (0, 1), 0)
    with pytest.raises(UsageError, match="do not fill rows of 8 tokens"):
        Trip(table, (0, 7, 16), (2, 2, 2, 2), (0, 1), 0)
    with pytest.raises(
        UsageError, match="is for 2 ranks and 4 blocks, not for 3 and 4"
    ):
        Trip(table, (0, 8), (2, 2, 2, 2), (0, 1, 2), 0)
    with pytest.raises(
        UsageError,
        match=r"layout\.context = 'zig' is not possible; did you mean 'zigzag'",
    ):
        tile_table_of("zig", 2)
    with pytest.raises(
        UsageError, match="Ulysses cannot split 4 heads over tp=2 x 4 ranks"
    ):
        check_fits(ModelShape(heads=4), Layout(cp=4, tp=2, context="ulysses"))
    with pytest.raises(UsageError, match=r"ulysses = 2 does not divide cp=3"):
        check_fits(ModelShape(heads=4), Layout(cp=3, ulysses=2))


def test_pieces_of_packed_documents() -> None:
    """Two rows of two blocks of 4: documents 0-6, 6-8 and 8-9, 9-16."""
    cu, lengths = (0, 6, 8, 9, 16), (4, 4)
    own = tile_pieces(cu, lengths, 1, 1)[0].segments
    assert [(s.q0, s.q1, s.causal) for s in own] == [
        (0, 2, True),
        (2, 4, True),
        (4, 8, True),
    ]
    assert [(p.rows, p.cols) for p in tile_pieces(cu, lengths, 1, 0)] == [
        (slice(0, 2), slice(0, 4)),
        (slice(4, 8), slice(5, 8)),
    ]
    assert tile_pieces((0, 4, 8), lengths, 1, 0) == []


def described(scheme: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    q, k, v = (torch.randn(1, 8, n, 8, requires_grad=True) for n in (4, 2, 2))
    cu = torch.tensor([0, 5, 8 * world], dtype=torch.int32)
    tests = ("test_schema", "test_faketensor")
    where = (list(range(world)), rank, [])
    torch.library.opcheck(
        tile_attention, (q, k, v, cu, scheme, *where), test_utils=tests
    )
    torch.library.opcheck(ring_self_attention, (q, k, v, cu, *where), test_utils=tests)


def test_the_operator_is_described_for_compilation(pool: Any) -> None:
    pool.run(2, described, "zigzag")


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made, and of all that autograd keeps of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.made = self.kept = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.made = max(self.made, x.numel() * x.element_size())
        return out

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        self.kept += x.numel() * x.element_size()
        return x


def scores_of(scheme: str, length: int) -> tuple[int, int]:
    """On every rank: bytes of the largest tensor, and of what backward is kept for, of a step of one document."""
    layout, heads, dim = Layout(cp=dist.get_world_size(), context=scheme), 4, 8
    attend = context_attention(
        Mesh.create(layout, "cpu"), ModelShape(heads=heads, kv_heads=2, head_dim=dim)
    )
    own = length // layout.cp
    q, k, v = (torch.randn(1, own, n, dim, requires_grad=True) for n in (heads, 2, 2))
    with Largest() as seen:
        with torch.autograd.graph.saved_tensors_hooks(seen.keep, lambda x: x):
            out = attend(q, k, v, torch.tensor([0, length], dtype=torch.int32))
        out.sum().backward()
    return seen.made, seen.kept


@pytest.mark.parametrize("world", [2, 4])
def test_ring_self_attention_holds_whole_rows_of_scores_and_no_other_scheme_does(
    pool: Any, world: int
) -> None:
    length = 128 * world
    scores = 4 * 4 * length**2 // world  # fp32, of four heads
    # q, k, v and out of own tokens, and cu_seqlens
    tokens = 4 * (2 * 32 + 2 * 16) * length // world + 4 * 2
    for made, kept in pool.run(world, scores_of, "rsa", length):
        assert made == scores and kept == scores + tokens
    for made, kept in pool.run(world, scores_of, "ring", length):
        # and the log-sum-exp
        assert made < scores / 4 and kept == tokens + 4 * 4 * length // world


def test_a_transfer_that_does_not_come_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, cu = torch.zeros(1, 4, 1, 2), torch.tensor([0, 8])
    trip = trip_of(q, cu, "ring", [3, 5], 0, [])
    work = mock.Mock()
    work.wait.side_effect = RuntimeError("Timed out")
    monkeypatch.setattr(trip, "_start", lambda step, *_: ([], [work] * (step == 0)))
    with pytest.raises(RuntimeError) as caught:
        trip.run(defaultdict(list), {}, {}, lambda *_: {}, mock.Mock())
    assert "step 0 of attention table 'ring'" in caught.value.__notes__[0]
    assert "kv of block 0 from rank 3 to 5" in caught.value.__notes__[0]
