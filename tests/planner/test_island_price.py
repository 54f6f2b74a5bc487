"""Sites as islands: what they send, and how often they can agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Command
from weft.planner.engine_constants import ENGINES
from weft.planner.island_price import (
    EVERY,
    EXPOSED,
    Islands,
    agreement,
    islands_of,
    sent,
    words,
)
from weft.planner.machine import Cluster
from weft.planner.planned_model import SHAPES
from weft.recipe import ModelShape
from weft.shapes.parameters import parameters
from weft.shapes.shape import shape_of
from weft.sync.compress import build_compressor

SHAPE = SHAPES["llama3-8b"]


def told(
    between: float, latency: float = 1000.0, count: int = 32, batch: int = 64
) -> tuple[Cluster, Islands | None]:
    cluster = Cluster(
        device="H100-80GB",
        count=count,
        site=16,
        between=between,
        between_latency=latency,
    )
    return cluster, islands_of(SHAPE, cluster, ENGINES["weft"], batch, 4096, 16, [])


def test_islands_agree_as_rarely_as_their_link_is_slow() -> None:
    before = 0
    for between in (10.0, 0.5, 0.05):
        cluster, found = told(between)
        assert found is not None and found.count == 2
        plain, eight, four = found.ways
        assert plain.every > before or plain.every == EVERY[-1]
        before = plain.every
        assert (
            plain.nbytes > 3.9 * eight.nbytes > 7 * four.nbytes
            and plain.every >= eight.every >= four.every
        )
        for way in found.ways:
            assert way.seconds == pytest.approx(
                found.inside.seconds + way.exchange / way.every
            )
            oftener = [n for n in EVERY if n < way.every]
            if way.every < EVERY[-1]:
                assert way.exposed <= EXPOSED
            if oftener:
                assert (
                    agreement(
                        SHAPE, cluster, found.inside, 2, way.compress, oftener[-1]
                    ).exposed
                    > EXPOSED
                )
    assert before >= 20


def test_more_islands_send_more_and_wait_longer() -> None:
    (_, two), (_, four) = told(0.5), told(0.5, count=64, batch=128)
    assert two is not None and four is not None and four.count == 4
    assert four.ways[0].nbytes == pytest.approx(1.5 * two.ways[0].nbytes, rel=1e-6)
    _, slow = told(0.5, latency=1e6)
    assert slow is not None and slow.ways[0].exchange == pytest.approx(
        two.ways[0].exchange + 2, rel=1e-2
    )


def test_where_nothing_can_be_an_island() -> None:
    assert told(0.5, count=16)[1] is None  # one site
    assert told(0.5, batch=63)[1] is None
    single = Cluster(device="H100-80GB", count=32)
    assert islands_of(SHAPE, single, ENGINES["weft"], 64, 4096, 16, []) is None
    tight = Cluster(device="H100-80GB", count=4, site=1, between=0.1)
    # one site is small
    assert (
        islands_of(SHAPES["llama3-70b"], tight, ENGINES["weft"], 64, 4096, 16, [])
        is None
    )


def test_bytes_are_those_of_the_streams() -> None:
    """The formula that tests/sync/test_islands.py counts on the wire: 2 (n - 1) / n of what a rank holds."""
    own = ModelShape(layers=2, embed=24, heads=4, kv_heads=2, head_dim=6, ffn=41)
    shape = shape_of(own, 257)
    count = sum(p.numel for p in parameters(own, 257))
    cluster = Cluster(device="cpu", count=2, site=1, between=0.1)
    found = islands_of(shape, cluster, ENGINES["weft"], 4, 19, 32, [])
    assert found is not None
    expected = [4 * count, (1 + 1 / 64) * count, (0.5 + 1 / 64) * count]
    assert [way.nbytes for way in found.ways] == pytest.approx(expected)


def test_the_command_tells(command: Command, tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(
        'device = "H100-80GB"\ncount = 32\nsite = 16\nbetween = 0.125\n'
    )
    words = (
        "plan",
        "llama3-8b",
        "--cluster",
        tmp_path / "two.toml",
        "--batch",
        64,
        "--seq",
        4096,
    )
    code, out, _ = command(*words, "--json")
    found = json.loads(out)
    assert code == 0 and found["islands"]["count"] == 2
    best = min(way["seconds"] for way in found["islands"]["agreements"])
    assert best < found["layouts"][0]["seconds"]  # in one layout over both sites
    code, out, _ = command(*words)
    assert "2 sites as islands of " in out and 'compress = "int4": ' in out


@pytest.mark.parametrize("word", words())
def test_a_parameter_takes_the_bytes_that_its_compressor_sends(word: str) -> None:
    count = 1 << 12
    assert build_compressor(word).nbytes((count,)) == sent(word) * count
