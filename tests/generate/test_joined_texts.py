"""Streams that see each other, against attention with an explicit mask and explicit positions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.generate.test_cache import build as build_kind
from tests.generate.test_many import count_preempted
from weft.errors import UsageError
from weft.generate.engine import Engine
from weft.generate.joined_texts import Tags, Thread, hogwild, multiverse
from weft.generate.request import Generation, Written
from weft.generate.sampled_text import SampledText, write_next_tokens
from weft.generate.sampling import GREEDY, Sampling
from weft.models.paged import attending
from weft.models.rope import angles, rotate
from weft.models.transformer import Transformer

T = torch.Tensor
PROMPT = [(5 * i + 2) % 31 for i in range(19)]
OPENINGS = [[1, 4], [9], [2, 2, 7], [30]]


def build(kind: str) -> Transformer:
    model = build_kind(kind)
    for p in model.parameters():
        p.data *= 1.3  # so that tokens matter to each other
    return model


class Visible:
    """Attention where ``mask`` ``[queries, keys]`` says, at distances ``apart``; what is given is at position 0."""

    def __init__(self, mask: T, apart: T, freq: T, width: int) -> None:
        self.mask, self.apart, self.freq, self.width = mask, apart, freq, width

    def __call__(self, q: T, k: T, v: T, cu_seqlens: T) -> T:
        group = q.shape[2] // k.shape[2]
        # [tokens, heads, width]
        keys, values = (x[0].repeat_interleave(group, 1) for x in (k, v))
        n, plain = len(keys), q.shape[-1] - self.width
        # [queries, keys, 1, width / 2]
        cos, sin = (x[0] for x in angles(self.apart, self.freq[None], q.dtype))
        # [queries, keys, heads, rotated]
        queries = q[0, :, None, :, plain:].expand(n, n, -1, -1)
        turned = rotate(queries, cos, sin)
        scores = torch.einsum("qkhd,khd->qkh", turned, keys[..., plain:])
        if plain:
            scores = scores + torch.einsum(
                "qhd,khd->qkh", q[0, ..., :plain], keys[..., :plain]
            )
        scores = (scores * q.shape[-1] ** -0.5).masked_fill(
            ~self.mask[..., None], -torch.inf
        )
        return torch.einsum("qkh,khd->qhd", scores.softmax(1), values)[None]


def reference(model: Transformer, ids: Sequence[int], mask: T, apart: T) -> T:
    """Logits ``[tokens, vocab]`` of all tokens at once."""
    freq = model.freq[0]
    layers = [Visible(mask, apart, freq, 2 * len(freq)) for _ in model.blocks]
    with torch.no_grad(), attending(model, layers):
        zero = torch.zeros(1, len(ids), dtype=torch.int64)
        return model(
            torch.tensor([list(ids)]),
            zero,
            torch.tensor([0, len(ids)], dtype=torch.int32),
        )[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [3, 16])
@pytest.mark.parametrize("kind", ["softmax", "experts"])
def test_workers_see_each_other_as_an_explicit_mask_says(kind: str, size: int) -> None:
    """Log-probabilities of all that four workers draw, whose texts begin with different numbers of tokens."""
    model, count = build(kind), 12
    engine, logits = Engine(model, size=size), dict[tuple[int, int], T]()

    def write(rows: T, texts: Sequence[SampledText]) -> list[Written]:
        for text in texts:
            request = text.generation
            logits[id(request), len(request.ids)] = rows[text.row]
        return write_next_tokens(rows, texts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.generate.engine.write_next_tokens", write)
        workers = hogwild(engine, PROMPT, OPENINGS, count, Sampling(seed=3))
    assert not engine.scheduler.pool.owners and all(
        len(one.written) == count for one in workers
    )
    # In the first step the prompt is read with all openings, and in each later one a token of every worker.
    tokens = [(None, at, 0) for at in range(len(PROMPT))]
    steps = {None: [0] * len(PROMPT)} | {
        w: [0] * len(OPENINGS[w]) + list(range(1, count + 1)) for w in range(4)
    }
    ids = list(PROMPT)
    for w, one in enumerate(workers):
        tokens += [(w, at, steps[w][at]) for at in range(len(one.ids))]
        ids += one.ids
    n = len(ids)
    mask, apart = (
        torch.zeros(n, n, dtype=torch.bool),
        torch.zeros(n, n, dtype=torch.int64),
    )
    for i, (mine, at, step) in enumerate(tokens):
        seen = {w: sum(s <= step for s in steps[w]) for w in range(4)}
        order = [] if mine is None else [None, *(w for w in range(4) if w != mine)]
        begin, starts = 0, dict[int | None, int]()
        for other in order:
            starts[other] = begin
            begin += len(PROMPT) if other is None else seen[other]
        starts[mine] = begin
        for j, (other, there, _) in enumerate(tokens):
            sees = (
                there <= at
                if other == mine
                else other in starts and there < (seen.get(other, len(PROMPT)))
            )
            mask[i, j] = sees
            apart[i, j] = starts[mine] + at - starts[other] - there if sees else 0
    # A prompt is computed before whoever sees it, and so are openings that see each other in one step.
    expected = reference(model, ids, mask, apart)
    for w, one in enumerate(workers):
        first = len(PROMPT) + sum(len(workers[x].ids) for x in range(w))
        for length in range(len(OPENINGS[w]), len(one.ids)):
            torch.testing.assert_close(
                logits[id(one), length], expected[first + length - 1], rtol=0, atol=1e-9
            )


def test_one_worker_is_as_usual() -> None:
    model = build("softmax")
    (one,) = hogwild(Engine(model, size=4), PROMPT, [OPENINGS[0]], 15, Sampling(seed=1))
    engine = Engine(model)
    (alone,) = engine.submit([*PROMPT, *OPENINGS[0]], 15, Sampling(seed=1))
    engine.run()
    assert one.written == alone.written


def test_workers_beside_others_in_a_cache_that_is_full() -> None:
    """Workers keep their blocks; others give theirs back, and write what they always do."""
    model = build("softmax")
    engine = Engine(model, tokens=100, size=4, limit=6)
    (other,) = engine.submit(PROMPT[:7], 40, GREEDY)
    engine.step()
    workers = hogwild(engine, PROMPT, OPENINGS[:2], 12, GREEDY)
    engine.run()
    roomy = Engine(model)
    (alone,) = roomy.submit(PROMPT[:7], 40, GREEDY)
    roomy.run()
    assert other.written == alone.written and not engine.scheduler.pool.owners
    assert [len(one.written) for one in workers] == [12, 12]


TAGS = Tags(outline=20, split=21, path=22, path_end=23, conclusion=24)


class Script:
    """Makes the model write what a plan says: a tree of texts, by the tags that it begins with."""

    def __init__(self, texts: dict[tuple[int, ...], list[int]]) -> None:
        self.texts, self.logits = texts, list[tuple[Generation, int, T]]()

    def __call__(self, rows: T, texts: Sequence[SampledText]) -> list[Written]:
        forced = rows.clone()
        for each in texts:
            request = each.generation
            if request.ids[0] == 29:
                continue
            self.logits.append((request, len(request.ids), rows[each.row]))
            text = self.texts[tuple(request.ids[: request.prompt])]
            forced[each.row] = -torch.inf
            forced[each.row, text[len(request.ids) - request.prompt]] = 0
        return write_next_tokens(forced, texts)


def scripted(
    engine: Engine, patch: pytest.MonkeyPatch, nested: bool = False
) -> tuple[Thread, Script]:
    """Three paths of 14 tokens, the second of which may part into two once more, and a conclusion."""
    drawn = random.Random(2)

    def text(n: int) -> list[int]:
        return [drawn.randrange(20) for _ in range(n)]

    main = [*text(3), TAGS.outline, 1, TAGS.outline, 2, TAGS.outline, 3, TAGS.split]
    second = (
        [*text(4), TAGS.outline, 11, TAGS.outline, 12, TAGS.split]
        if nested
        else [*text(14), TAGS.path_end]
    )
    script = Script({
        tuple(PROMPT): main,
        (TAGS.path, 1): [*text(14), TAGS.path_end],
        (TAGS.path, 2): second,
        (TAGS.path, 3): [*text(11), TAGS.path_end],
        (TAGS.path, 11): [*text(5), TAGS.path_end],
        (TAGS.path, 12): [*text(3), TAGS.path_end],
        (TAGS.conclusion,): [*text(6), 30] if not nested else [*text(6), TAGS.path_end, 30],
    })  # fmt: skip
    patch.setattr("weft.generate.engine.write_next_tokens", script)
    return multiverse(engine, PROMPT, TAGS, 40, GREEDY, {30}), script


def packed(
    pieces: Sequence[Generation],
) -> tuple[list[int], T, T, dict[Generation, int]]:
    """All pieces in one row: ids, who sees whom, how far apart, and where each piece begins."""
    ids, first = list[int](), dict[Generation, int]()
    for piece in pieces:
        first[piece] = len(ids)
        ids += piece.ids
    n = len(ids)
    mask, places = (
        torch.zeros(n, n, dtype=torch.bool),
        torch.zeros(n, dtype=torch.int64),
    )
    for piece in pieces:
        own = slice(first[piece], first[piece] + len(piece.ids))
        places[own] = piece.offset + torch.arange(len(piece.ids))
        mask[own, own] = torch.ones(len(piece.ids), len(piece.ids)).tril().bool()
        for view in piece.context:
            assert isinstance(view.request, Generation)
            mask[
                own, first[view.request] : first[view.request] + (view.tokens or 0)
            ] = True
    return ids, mask, (places[:, None] - places) * mask, first


def all_pieces(logits: Sequence[tuple[Generation, int, T]]) -> list[Generation]:
    return list(dict.fromkeys(piece for piece, _, _ in logits))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "settings",
    [{}, {"size": 3}, {"tokens": 220, "size": 4}, {"budget": 5, "size": 4}],
    ids=str,
)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["softmax", "experts"])
def test_paths_are_what_a_packed_mask_makes_of_them(
    kind: str, nested: bool, settings: dict[str, Any]
) -> None:
    model = build(kind)
    engine = Engine(model, **settings)
    with pytest.MonkeyPatch.context() as patch:
        if "tokens" in settings:  # somebody came before, and takes blocks of paths away
            preempted = count_preempted(patch)
            engine.submit([29] * 140, 60, GREEDY)
        whole, script = scripted(engine, patch, nested)
        engine.run()
    if "tokens" in settings:
        assert any(isinstance(one, Generation) and one.context for one in preempted)
    pieces = all_pieces(script.logits)
    assert len(pieces) == (8 if nested else 5) and whole.done
    ids, mask, apart, first = packed(pieces)
    expected = reference(model, ids, mask, apart)
    for piece, length, row in script.logits:
        torch.testing.assert_close(
            row, expected[first[piece] + length - 1], rtol=0, atol=1e-9
        )
    assert not engine.scheduler.pool.owners and not engine.scheduler.running
    conclusion = whole.pieces[-1]
    assert len(whole.pieces) == 2 and conclusion.offset == max(
        piece.offset + len(piece.ids) for piece in pieces if piece is not conclusion
    )


def test_steps_are_the_depth_of_the_tree_and_nothing_is_computed_twice() -> None:
    model, read = build("softmax"), list[int]()
    model.embedding.register_forward_pre_hook(
        lambda _, inputs: read.append(inputs[0].shape[1])
    )
    with pytest.MonkeyPatch.context() as patch:
        whole, script = scripted(Engine(model), patch)
    pieces = all_pieces(script.logits)
    written = [len(piece.written) for piece in pieces]
    depth = written[0] + max(written[1:4]) + written[4]
    assert len(read) <= depth + 4 and sum(written) > 1.7 * len(read)
    assert sum(read) <= sum(len(piece.ids) for piece in pieces)
    assert whole.done


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("retention", "linear attention does not keep"),
        ("windows", "the last tokens only"),
    ],
)
def test_what_cannot_be(kind: str, said: str) -> None:
    engine = Engine(build_kind(kind))
    with pytest.raises(UsageError, match=said):
        hogwild(engine, PROMPT, OPENINGS, 4, GREEDY)
    with pytest.raises(UsageError, match=said):
        multiverse(engine, PROMPT, TAGS, 4, GREEDY)
    small = Engine(build_kind("softmax"), tokens=32, size=4)
    with pytest.raises(
        UsageError,
        match=r"5 texts that see each other may need 2\d of the cache's 8 blocks",
    ):
        hogwild(small, PROMPT, OPENINGS, 12, GREEDY)
    with pytest.raises(
        UsageError,
        match="1 texts that see each other may need 15 of the cache's 8 blocks",
    ):
        multiverse(small, PROMPT, TAGS, 40, GREEDY)
    assert not small.scheduler.pool.owners and not small.scheduler.waiting


def test_more_paths_than_requests_at_once_are_refused_and_do_not_wait_for_ever() -> (
    None
):
    engine, steps, step = (
        Engine(build("softmax"), limit=3),
        itertools.count(),
        Engine.step,
    )

    def stepping(self: Engine) -> Any:
        assert next(steps) < 200, "they wait for ever"
        return step(self)

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(UsageError, match="4 of 3 requests at once"),
    ):
        patch.setattr(Engine, "step", stepping)
        scripted(engine, patch)
    assert not engine.scheduler.pool.owners and not engine.scheduler.waiting
