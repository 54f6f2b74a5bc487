"""Cache policies: exact where the budget covers all, and functions of the text alone where it does not."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.generate.test_adapters import TARGETS, write
from tests.generate.test_leader import model_under
from tests.generate.test_migration import move
from tests.generate.test_phase_options import PLAIN
from weft.checkpoint.convert.peft import read_adapter
from weft.errors import UsageError
from weft.generate.beam_search import Search
from weft.generate.cache_policy import CachePolicy, cache_policy_of
from weft.generate.engine import Engine
from weft.generate.leader import follow_leader
from weft.generate.lookup import Lookup
from weft.generate.open_engine import EngineOptions
from weft.generate.sampling import GREEDY
from weft.layout.layout import Layout
from weft.models.spans import Span
from weft.models.transformer import Transformer
from weft.registry import register
from weft.techniques.cache_policies.alisa import drawn_tokens, key_codes, query_selector

PROMPTS = [[(7 * i + 3 * j) % 31 for i in range(n)] for j, n in enumerate((5, 24, 40))]
NEW = 14
EXACT = ("window:100", "blocks:1.0", "alisa:1.0", "alisa:1:query")
SPARSE = (
    "window:8",
    "blocks:0.2",
    "alisa:0.2",
    "alisa:0.2:host=48:int8:prompts",
    "alisa:0.5:query",
    "alisa:0.2:query",
    "alisa:0.4:drawn",
)
#: Settings that may change nothing, and whether they move blocks or take them from requests.
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks": {"budget": 7},
    "turns": {"budget": 5, "limit": 2},
    "small": {"budget": 8, "tokens": 72},
}
Answer = tuple[list[int], list[float]]


@cache
def model_of(mixer: str = "softmax") -> Transformer:
    return model_under(Layout(), mixer)


def write_all(engine: Engine, adapter: str = "") -> list[Answer]:
    """What is written for all prompts at once, with log-probabilities."""
    texts = [engine.submit(p, NEW, GREEDY, top=0, adapter=adapter)[0] for p in PROMPTS]
    engine.run()
    assert not engine.scheduler.pool.owners
    assert not any(engine.scheduler.pool.lent.values())
    return [(text.written, [p for p, _ in text.log_probabilities]) for text in texts]


def opened(word: str, mixer: str = "softmax", **setting: Any) -> Engine:
    policy = cache_policy_of(word)
    return Engine(model_of(mixer), cache_policy=policy, **{"size": 4} | setting)


@cache
def written(word: str, mixer: str = "softmax") -> list[Answer]:
    return write_all(opened(word, mixer))


def assert_equal(answers: list[Answer], expected: list[Answer]) -> None:
    for (ids, scores), (same, others) in zip(answers, expected, strict=True):
        assert ids == same
        assert max(abs(p - q) for p, q in zip(scores, others, strict=True)) < 1e-10


@pytest.mark.sampled(2)
@pytest.mark.parametrize("word", EXACT)
def test_a_budget_for_all_is_exact(word: str) -> None:
    """Also where blocks are on the host, and for layers with windows of their own."""
    for setting in ({}, SETTINGS["small"]):
        assert_equal(write_all(opened(word, **setting)), written("none"))
    if not word.startswith("alisa"):
        assert_equal(written(word, "windows"), written("none", "windows"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("word", SPARSE)
def test_what_is_seen_depends_on_the_text_alone(word: str) -> None:
    """Whatever the chunks, the other requests, and the size of the cache are; and something else is written."""
    assert written(word) != written("none")
    for name, setting in SETTINGS.items():
        engine = opened(word, **setting)
        answers = write_all(engine)
        if "int8" in word:  # numbers that are rounded twice
            assert [ids for ids, _ in answers] == [ids for ids, _ in written(word)]
        else:
            assert_equal(answers, written(word))
        if name == "small" and not word.startswith("window"):
            usage = engine.policy_usage()
            assert usage.moved if "alisa" in word else usage.dropped
            assert usage.chosen <= usage.read < usage.keys or "blocks" in word


def test_a_window_frees_blocks_and_reads_less() -> None:
    """A text is twice as long as the cache: first block, window, step."""
    engine = opened("window:8", tokens=32, budget=8)
    text = engine.submit(PROMPTS[2], 30, GREEDY)[0]
    most = 0
    while not text.finished:
        engine.step()
        most = max(most, len(engine.scheduler.pool.owners))
    assert most <= 6 and len(text.ids) == 70
    assert engine.scheduler.hidden_blocks >= 12 and not engine.scheduler.preemptions
    engine = opened("window:8")
    alone = engine.submit(PROMPTS[2], 30, GREEDY)[0]
    engine.run()
    assert alone.written == text.written
    reads = engine.reader.pages[0].selector.reads  # type: ignore[union-attr]
    # up to 16 keys of 70, and fewer at the beginning
    assert reads.read == reads.chosen < 0.5 * reads.all


def test_a_text_longer_than_the_cache_begins_though_its_beginning_is_known() -> None:
    """Of its known blocks it takes no more than leave room for a step."""
    longer = PROMPTS[2] + [(5 * i + 1) % 31 for i in range(60)]
    engine = opened("window:8", tokens=48, budget=16)
    engine.submit(PROMPTS[2], 4, GREEDY)
    engine.run()
    text = engine.submit(longer, 8, GREEDY)[0]
    for _ in range(20):
        engine.step()
    whole = opened("window:8")
    alone = whole.submit(longer, 8, GREEDY)[0]
    whole.run()
    assert text.written == alone.written and text.hits == 32


def test_blocks_behind_a_window_are_not_there_for_others_after_a_move() -> None:
    """The engine that a text comes to has other keys in their place."""
    source, target = opened("window:8"), opened("window:8")
    text = source.submit(PROMPTS[2], 20, GREEDY)[0]
    while len(text.written) < 5:
        source.step()
    moved = move(source, target, text, 0).request
    target.run()
    shorter = [*PROMPTS[2][:16], 1]
    later = target.submit(shorter, 8, GREEDY, top=0)[0]
    target.run()
    whole = opened("window:8")
    expected = [whole.submit(ids, n, GREEDY)[0] for ids, n in ((PROMPTS[2], 20), (shorter, 8))]  # fmt: skip
    whole.run()
    assert [moved.written, later.written] == [each.written for each in expected]
    assert later.hits == 4 and not target.scheduler.pool.owners


def test_blocks_that_arrive_between_passes_are_taken_note_of() -> None:
    """As a connection's thread does it, which is not in inference mode, for selectors that have seen passes."""
    for word in SPARSE:
        engine = opened(word)
        write_all(engine)
        for pages in engine.reader.pages:
            pages.loaded([0, 1])


def test_blocks_read_their_share() -> None:
    engine = opened("blocks:0.25")
    engine.submit([3] * 4, 1, GREEDY)
    text = engine.submit(PROMPTS[2] * 3, 10, GREEDY)[0]
    while len(text.written) < 2:
        engine.step()
    selector = engine.reader.pages[0].selector  # type: ignore[union-attr]
    before = selector.reads
    engine.run()
    seen, chosen, read = (b - a for a, b in zip(before, selector.reads, strict=True))
    assert chosen == read and 0.24 < read / seen < 0.29


def test_alisa_reads_prompts_whole_and_chooses_for_what_is_written() -> None:
    """The first token is that of all keys; written tokens that become a prompt are read whole, too."""
    none = written("none")[2]
    dense, sparse = written("alisa:0.2")[2], written("alisa:0.2:prompts")[2]
    assert abs(dense[1][0] - none[1][0]) < 1e-12 < abs(sparse[1][0] - none[1][0])
    assert max(abs(a - b) for a, b in zip(dense[1], none[1], strict=True)) > 1e-6
    engine = opened("alisa:0.2")
    text = engine.submit([*PROMPTS[2], *none[0][:6]], 1, GREEDY, top=0)[0]
    engine.run()
    assert text.written == none[0][6:7]
    assert abs(text.log_probabilities[0][0] - none[1][6]) < 1e-12
    selector = engine.reader.pages[0].selector  # type: ignore[union-attr]
    assert selector.reads.chosen == selector.reads.all


def test_the_query_finds_the_tokens_with_most_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exactly where two bits say all of keys, on the device and on the host; elements that it reads count as keys."""
    size, heads, width = 4, 2, 8
    drawn = torch.Generator().manual_seed(0)
    store = torch.randn(2, 12, size, heads, width, dtype=torch.double, generator=drawn)
    # in each block every element has the codes 0 to 3 once
    codes = store[0].argsort(1).double()
    store[0] = codes * 0.5 + torch.randint(-8, 8, (12, 1, heads, width), generator=drawn) / 4  # fmt: skip
    q = torch.randn(1, 3 * heads, width, dtype=torch.double, generator=drawn)
    table = [3, 0, 5, 1, 7, 9, 2, 8, 4, 6]
    span = Span(0, 1, 37, table)
    selector = query_selector.QuerySelector(0.9, size, False)
    selector.sums = torch.zeros(2, 12, size, heads)
    monkeypatch.setattr(selector, "elements", 1.0)
    pages: Any = SimpleNamespace(store=store)
    selector.loaded(pages, table)
    seen, drawn_ones = selector._choose(span, store, q)
    # 32 of 36 tokens before its block: 9 for codes of 8 bits with their ranges, and half of a sample of 3
    assert selector._looked(span, store) == 11
    assert seen.shape == (heads, 18 + 3 + 2)  # of 21 three are the last ones
    assert drawn_ones is not None and drawn_ones.first == 12
    keys = store[0, table].flatten(0, 1)[:37]
    weights = torch.einsum("hgw,khw->hgk", q[0].unflatten(0, (heads, -1)), keys[:36])
    weights = (weights * width**-0.5).softmax(-1).sum(1)[:, : 36 - 3]
    for head, places in enumerate(seen.tolist()):
        best = weights[head].topk(12).indices.tolist()
        assert sorted(places[:12]) == sorted(best) and places[18:] == [*range(33, 38)]
        assert not {*places[12:18]} & {*best, *places[18:]}
        rest = weights[head].pow(query_selector.POWER)
        rest[best] = 0
        expected = rest.sum() / (6 * rest[places[12:18]])
        torch.testing.assert_close(drawn_ones.counts[head].exp(), expected)
    selector._move(pages, [(5, -1), (9, -2)])
    selector.loaded(pages, [5, 9, 0])  # other texts' keys
    store[:, [5, 9]] = 0
    table[2], table[5] = -1, -2
    again = selector._choose(span, store, q)
    assert torch.equal(again.places, seen) and again.drawn is not None
    torch.testing.assert_close(again.drawn.counts, drawn_ones.counts)


@given(st.integers(1, 9), st.integers(0, 99), st.floats(1e-3, 1e3))
def test_codes_of_keys_are_near_them(size: int, seed: int, scale: float) -> None:  # fmt: skip
    """By half a step of the element's range in the block, and its lowest value's rounding; also in a second text."""
    drawn = torch.Generator().manual_seed(seed)
    keys = torch.randn(5, size, 3, 6, generator=drawn) * scale
    keys += torch.randn(1, 1, 3, 6, generator=drawn) * scale
    blocks, q = torch.tensor([4, 0, 2, 9, 7]), torch.eye(6).expand(3, -1, -1)
    codes = key_codes.KeyCodes(size)
    codes.write(blocks, torch.randn(5, size, 3, 6, generator=drawn), 10)
    codes.write(blocks, keys, 12)
    assert len(codes.codes) == len(codes.steps) == 12
    every = torch.arange(6).expand(3, -1)
    # [kv_heads, width, blocks, size]
    near = codes.scores(blocks, q, every).unflatten(2, (5, size))
    keys = keys.permute(2, 3, 0, 1)
    steps = (keys.amax(-1) - keys.amin(-1)) / 3
    # a step in 8 bits is up to an eighth off; the lowest value has 8 bits, too
    allowed = 0.7 * steps + keys.abs().amax(-1) / 128 + 2**-14
    assert bool(((near - keys).abs() <= allowed[..., None]).all())
    away = key_codes.KeyCodes(size)
    away.take([1, 0], codes, [2, 9])
    assert torch.equal(away.scores(torch.tensor([1, 0]), q, every), near[:, :, 2:4].flatten(2))  # fmt: skip
    some = torch.tensor([[1, 4], [0, 5], [3, 2]])
    part = codes.scores(blocks, q.transpose(1, 2), some).unflatten(2, (5, size))
    for head, elements in enumerate(some.tolist()):
        assert torch.equal(part[head, elements], near[head, elements])
        assert not part[head, [n for n in range(6) if n not in elements]].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_keys_that_are_alike_are_chosen_in_the_order_of_the_text(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their scores differ by what else a step computes: texts would be others beside others."""
    size, heads = 4, 2
    drawn = torch.Generator().manual_seed(0)
    weights = torch.rand(heads, 12, generator=drawn, dtype=dtype)[
        :, torch.arange(96) % 12
    ]
    store = torch.zeros(2, 24, size, heads, 8, dtype=dtype)
    chosen = []
    for _ in range(8):
        selector = query_selector.QuerySelector(0.5, size, False)
        noise = torch.rand(weights.shape, generator=drawn, dtype=dtype)
        standing = weights * (1 + 4 * torch.finfo(dtype).eps * noise)
        monkeypatch.setattr(
            selector, "_standing", lambda *given, weights=standing: weights
        )
        span = Span(0, 1, 97, [*range(25)])
        blocks = torch.arange(24)
        chosen.append(
            selector._choose_far(span, store, store[0, 0], blocks, 90, 40).places
        )
    assert all(torch.equal(each, chosen[0]) for each in chosen)


def sparse_and_whole(
    store: torch.Tensor, q: torch.Tensor, past: int, **changed: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one token by a :class:`QuerySelector` that sees half, and that to all keys."""
    size, heads, width = store.shape[2:]
    table = [*range(store.shape[1])]
    selector = query_selector.QuerySelector(0.5, size, False, evenly=True)
    for name, value in changed.items():
        setattr(selector, name, value)
    reading = SimpleNamespace(spans=[Span(0, 1, past, table)], slots=torch.tensor([past]), prepared={})  # fmt: skip
    pages: Any = SimpleNamespace(store=store, reading=reading)
    selector.loaded(pages, table)
    selector.written(pages)
    out = torch.empty_like(q)
    selector.attend(pages, q, out, 0)
    assert selector.reads.chosen <= 0.5 * selector.reads.all
    # [2, heads, tokens, width]
    every = store.flatten(1, 2)[:, : past + 1].transpose(1, 2)
    keys, values = every.repeat_interleave(q.shape[1] // heads, 1)
    weights = (keys @ q[0, ..., None] * width**-0.5).softmax(1)
    return out, (weights.transpose(1, 2) @ values)[None, :, 0]


def test_tokens_that_are_drawn_stand_for_the_others() -> None:
    """Attention is that to all keys where those that are left out are like those that are drawn."""
    size, heads, width, past = 4, 2, 8, 203
    drawn = torch.Generator().manual_seed(1)
    store = torch.randn(2, 51, size, heads, width, dtype=torch.double, generator=drawn)
    q = torch.randn(1, 3 * heads, width, dtype=torch.double, generator=drawn)
    texts = store.flatten(1, 2)
    # the far tokens, but for five with much weight
    texts[:, : past - 11] = texts[:, :1].clone()
    towards = q[0].unflatten(0, (heads, -1)).sum(1)
    texts[0, 7:100:20] = 3 * towards / towards.norm(dim=-1, keepdim=True)
    texts[1, 7:100:20] += 1
    out, whole = sparse_and_whole(store, q, past)
    assert (sparse_and_whole(store, q, past, drawn=0.0)[0] - whole).abs().max() > 0.1
    # codes of equal keys differ by the others in their blocks, and with them how often each is drawn
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-3)


def test_draws_have_no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over many draws is attention to all keys, where the tokens with most weight alone are another text."""
    drawn = torch.Generator().manual_seed(2)
    store = torch.randn(2, 51, 4, 2, 8, dtype=torch.double, generator=drawn)
    store[1] += store[0]  # what is looked at says what is seen
    q = torch.randn(1, 6, 8, dtype=torch.double, generator=drawn)
    total = torch.zeros_like(q)
    for turn in range(64):
        monkeypatch.setattr(query_selector, "GOLDEN", (turn + 0.5) / 64 / 203)
        out, whole = sparse_and_whole(store, q, 203)
        total += out
    best = sparse_and_whole(store, q, 203, drawn=0.0)[0]
    assert (total / 64 - whole).norm() < 0.1 * (best - whole).norm()


def test_a_drawn_token_with_much_weight_counts_once() -> None:
    """Elements have not shown it: it stands for no others, and neither do those that fit the query as little."""
    scores = torch.tensor([4.0, 2.0, 3.0, 9.0, 2.5, 1.0, 0.0], dtype=torch.double)
    counts = torch.tensor([[3.0, 3.0, 3.0, -torch.inf]], dtype=torch.double)
    for level, expected in ((0.5, [9.0, 5.5, 4.0]), (None, [12.0, 5.5, 4.0])):
        row = scores[None, None, None].clone()
        drawn_tokens.count_drawn(row, drawn_tokens.DrawnTokens(3, counts, level))
        assert row.flatten().tolist() == [4, 2, 3, *expected, -torch.inf]
    # drawn three times it counts three times a third
    row = torch.tensor([0.0, 0.0, 2.0, 2.0, 2.0], dtype=torch.double)[None, None, None]
    third = torch.full((1, 3), 1 / 3, dtype=torch.double).log()
    drawn_tokens.count_drawn(row, drawn_tokens.DrawnTokens(2, third, 0.25))
    torch.testing.assert_close(row[..., 2:].exp().sum().log().item(), 2.0)


def test_beams_see_what_texts_see() -> None:
    """The prompt is read whole, and beams that fork choose for each written token as a text alone does."""
    best, alone = (
        Search(opened("alisa:0.2"), PROMPTS[2], 4, 3).run(),
        opened("alisa:0.2"),
    )
    for each in best:
        chance = 0.0
        for at, token in enumerate(each.ids):
            before = each.ids[:at]
            text = alone.submit(PROMPTS[2], at + 1, GREEDY, top=31, written=before)[0]
            alone.run()
            chance += text.log_probabilities[0][1][token]
        assert abs(chance - each.log_probability) < 1e-10
    assert len({each.ids[0] for each in best}) < len(best) == 3  # some have forked


def test_prefixes_are_shared_unless_sums_are_kept() -> None:
    """Texts that begin alike find their blocks, and several texts of a prompt share them."""
    for word in ("window:8", "blocks:0.2", "alisa:0.2"):
        expected = write_all(opened(word))[2]
        engine = opened(word)
        write_all(engine)
        again = engine.submit(PROMPTS[2], NEW, GREEDY, top=0, n=2)
        engine.run()
        assert [text.written for text in again] == [expected[0]] * 2
        assert (again[0].hits > 0) == (word != "alisa:0.2"), word


def test_guesses_change_nothing() -> None:
    for word in ("window:8", "blocks:0.2"):
        guessing = opened(word, drafter=Lookup(least=1, width=2))
        assert [a for a, _ in write_all(guessing)] == [a for a, _ in written(word)]


@pytest.mark.soak
def test_adapters_change_what_is_written_alike(tmp_path: Path) -> None:
    model = model_of()
    adapter = read_adapter(write(tmp_path / "a", model, 2, 1, TARGETS), model)
    for word in (EXACT[1], *SPARSE[:3]):
        several = []
        for setting in ({}, {"budget": 7, "limit": 2}):
            engine = opened(word, **setting)
            engine.add_adapter("a", adapter)
            several.append(write_all(engine, "a"))
        assert_equal(*several)
        assert several[0] != written(word)


def answers_under(layout: str, words: tuple[str, ...]) -> Any:
    model = model_under(Layout.parse(layout), "softmax")
    if dist.get_rank():
        return [follow_leader(model) for _ in words] and None
    answers = []
    for word in words:
        policy = cache_policy_of(word)
        engine = Engine(model, cache_policy=policy, ranks=True, **SETTINGS["small"] | {"size": 4})  # fmt: skip
        answers.append(write_all(engine))
        engine.close()
    return answers


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "tp=2,pp=2"])
def test_each_rank_selects_for_its_heads(pool: Any, layout: str) -> None:
    words = (*EXACT[:3], *SPARSE[:3], "alisa:0.5:query")
    answers, *_ = pool.run(Layout.parse(layout).world, answers_under, layout, words)
    for word, written_there in zip(words, answers, strict=True):
        assert_equal(written_there, written("none" if word in EXACT else word))


@pytest.mark.parametrize(("word", "line"), [
    ("windw:64", r"did you mean 'window'\? Give none, alisa:0.25, blocks:0.25, window:1024"),
    ("x", "cannot be 'x'; give none, alisa:0.25, blocks:0.25, window:1024"),
    ("blocks:2", "behind blocks: comes a share of the blocks, above 0 and at most 1; give, for instance, blocks:0.25"),
    ("window", "cannot be 'window'"), ("window:0", "cannot be 'window:0'"), ("window:-3", "cannot be"),
    ("blocks:0", "cannot be 'blocks:0'"), ("blocks:1.5", "cannot be"), ("blocks:nan", "cannot be"),
    ("alisa:0.2:int4", "cannot be"), ("alisa:0.2:int8:int8", "cannot be"),
    ("alisa:0.2:host=x", "cannot be"), ("none:3", "nothing comes behind none"),
    ("window:3", "is less than a cache block of 4 tokens; give window:4 or more"),
    ("alisa:0.5:query:query", "cannot be"),
    ("alisa:0.18:query", "cache blocks of size 4; give a share of 0.1875 or more, or leave query and drawn out"),
    ("alisa:0.5:host=3", "room on the host for less than a cache block of 4 tokens; give host=4 or more"),
])  # fmt: skip
def test_words_that_cannot_be(word: str, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        opened(word)


@pytest.mark.usefixtures("no_plugins")
def test_a_policy_without_an_argument_is_named_alone() -> None:
    """As quotas and scheduling policies are: an argument that is missing is None for all of them."""

    @register("cache-policy", "whole")
    class Whole(CachePolicy):
        pass

    policy = cache_policy_of("whole")
    assert isinstance(policy, Whole)
    assert policy.word == "whole"
    with pytest.raises(
        UsageError, match="nothing comes behind whole; leave the rest out"
    ):
        cache_policy_of("whole:3")
    with pytest.raises(
        UsageError, match=r"give none, alisa:0\.25, blocks:0\.25, window:1024, whole$"
    ):
        cache_policy_of("x")


@pytest.mark.parametrize(("mixer", "word", "line"), [
    ("hybrid", "window:8", "is not for layers of linear attention, which keep a state"),
    ("latent", "blocks:0.5", "is not for layers of latent attention"),
    ("windows", "alisa:0.5", "is not for layers with attention windows of their own; leave it out"),
])  # fmt: skip
def test_layers_that_cannot_be_served(mixer: str, word: str, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        opened(word, mixer)


@pytest.mark.parametrize(("word", "given", "line"), [
    ("window:64", {"invariant": True}, "cannot be combined with --invariant; leave one of them out"),
    ("window:64", {"lend": True}, "cannot be combined with --lend"),
    ("window:64", {"models": Path("m")}, "cannot be combined with --models"),
    ("blocks:0.5", {"phases": "split"}, "cannot be combined with --phases split"),
    ("blocks:0.5", {"layout": "cp=2"}, "cannot be combined with cp in --layout"),
    ("alisa:0.5", {"draft": "lookup"}, "cannot be combined with --draft"),
    ("alisa:0.5", {"host_cache": 1.0}, "cannot be combined with --host-cache"),
])  # fmt: skip
def test_options_that_cannot_be_combined(word: str, given: dict[str, Any], line: str) -> None:  # fmt: skip
    with pytest.raises(UsageError, match=line):
        EngineOptions(**PLAIN | given, cache_policy=word).check()
    with pytest.raises(UsageError, match="cannot be combined with engines between"):
        EngineOptions(**PLAIN, cache_policy="alisa:0.5").check_moves()


def test_what_is_opened_elsewhere_is_refused_too() -> None:
    with pytest.raises(UsageError, match="cannot be combined with guesses"):
        opened("alisa:0.5", drafter=Lookup())
    with pytest.raises(UsageError, match="do not depend on other requests"):
        opened("blocks:0.5", invariant=True)
    with pytest.raises(UsageError, match="nor a cache policy; leave these out"):
        opened("blocks:0.5").add_model("m", model_of())
    options = EngineOptions(**PLAIN, cache_policy="window:64")
    assert options.numerics == "float window:64"
    assert "--cache-policy=window:64" in options.words("cache")
    assert torch.is_inference_mode_enabled() is False
