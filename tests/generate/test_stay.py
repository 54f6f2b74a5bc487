"""Tokens that stay on the rank of their experts while texts are written: the same tokens, and what travels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.generate.test_leader import NAMES, SHAPE, answers, answers_of_one, under
from weft.checkpoint.convert.routing import chosen_experts
from weft.errors import UsageError
from weft.generate.engine import Engine
from weft.generate.leader import Leader, check_layout, follow_leader, mesh_of_rank
from weft.generate.request import Generation
from weft.generate.sampling import GREEDY
from weft.layout.layout import Layout
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.parallel.experts import rows
from weft.recipe import ModelShape, Train
from weft.techniques.dispatch.stay import decode as stay

NEW, PROMPTS = 6, ([3], [7], [3, 1])


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["cp=2,ep=2", "cp=3,ep=3", "cp=4,ep=4"])
@pytest.mark.parametrize("mixer", ["experts"])
def test_tokens_are_those_of_one_rank(pool: Any, mixer: str, layout: str) -> None:
    """In float64, with log-probabilities: prompts in chunks, found prefixes, texts that are computed again."""
    expected = answers_of_one(mixer, "float64")
    found, *_ = pool.run(
        Layout.parse(layout).world, under, f"{layout},dispatch=stay", mixer, "float64", NAMES, answers, timeout=100
    )  # fmt: skip
    for name, (written, hits, preempted) in zip(NAMES, found, strict=True):
        assert hits >= 12 and bool(preempted) == ("small" in name), name
        for (ids, said), (single, said_alone) in zip(written, expected, strict=True):
            assert ids == single, name
            for (p, best), (q, top) in zip(said, said_alone, strict=True):
                assert abs(p - q) < 1e-10
                assert all(abs(best[i] - top[i]) < 1e-10 for i in top)


def mixture(layout: str, k: int, dispatch: str = "stay", **more: Any) -> Transformer:
    shape = SHAPE | {"experts": 4, "experts_per_token": k, "first_dense": 1} | more
    way = f"{layout},dispatch={dispatch}" if layout else ""
    mesh = mesh_of_rank(Layout.parse(way), "cpu")
    train = Train(seed=2, dtype="float64")
    return parallelize(ModelShape(**shape), mesh, train, summed=False)[0]


def written_and_sent(layout: str, k: int, more: dict[str, Any]) -> Any:
    """On the first rank: tokens of each prompt, with ``k = 1`` one text after the other; the rows that travelled, the
    exchanges of each decode step, the line for the user, and the tokens' log-probabilities.
    """
    model = mixture(layout, k, **more)
    if layout and dist.get_rank():
        follow_leader(model)
        return None
    engine, exchanges = Engine(model, ranks=bool(layout)), list[int]()
    texts: list[Generation] = []
    calls, run, exchanged = [0], stay.StayingTokens.run, rows.exchanged_rows

    def counted(*given: Any) -> Any:
        calls[0] += 1
        return exchanged(*given)

    def counting(self: stay.StayingTokens, *given: Any) -> torch.Tensor:
        calls[0] = 0
        x = run(self, *given)
        exchanges.append(calls[0])
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "exchanged_rows", counted)
        patch.setattr(stay.StayingTokens, "run", counting)
        for prompt in PROMPTS:
            texts += engine.submit(prompt, NEW, GREEDY, top=1)
            if k == 1:
                engine.run()
        engine.run()
    reader = engine.reader
    sent = dict(reader.decode.travelled) if isinstance(reader, Leader) else {}
    line = engine.travel_summary()
    engine.close()
    written = [text.written for text in texts]
    scores = [p for text in texts for p, _ in text.log_probabilities]
    return written, sent, exchanges, line, scores


def walked(texts: list[list[int]], ranks: int) -> tuple[int, int]:
    """How often tokens move if each stays with its only expert, and how many are computed alone, by one device's
    routers.
    """
    model, moved, begins, count = mixture("", 1), 0, dict[int, int](), 0
    for prompt, text in zip(PROMPTS, texts, strict=True):
        ids = [*prompt, *text][:-1]
        of_layers = torch.tensor([x[:, 0].tolist() for x in chosen_experts(model, ids)])
        owners = of_layers // (4 // ranks)  # [layers, tokens]
        # several tokens of a prompt return home
        first = 0 if len(prompt) == 1 else len(prompt)
        for place in range(first, len(ids)):
            here = begins.get(ids[place], 0)
            for owner in owners[:, place].tolist():
                moved += owner != here
                here = owner
            begins[ids[place]] = int(owners[0, place])
            count += 1
    return moved, count


def test_a_token_moves_once_for_a_layer_whose_expert_is_elsewhere(pool: Any) -> None:
    """One exchange per layer with experts and one of the context; rows as a walk over one device's choices says."""
    (texts, sent, exchanges, line, scores), *_ = pool.run(2, written_and_sent, "cp=2,ep=2", 1, {})  # fmt: skip
    alone = written_and_sent("", 1, {})
    assert texts == alone[0] and scores == pytest.approx(alone[4], rel=1e-10)
    moved, count = walked(texts, 2)
    layers = SHAPE["layers"] - 1
    rest = {"results": 0, "tokens": count, "layers": count * layers, "contexts": count}
    assert moved and sent == {"moved": moved} | rest
    assert set(exchanges) == {layers + 1} and len(exchanges) == count
    assert f"{moved / count / layers:.2f} rows per layer" in line


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("more", [
    {}, {"shared_experts": 1, "shared_mix": "gate"}, {"router_early": True}, {"experts": 2}, {"first_dense": 0},
], ids=str)  # fmt: skip
def test_several_experts_of_a_token(pool: Any, more: dict[str, Any]) -> None:
    """Results of other ranks' experts go where the token stays; also where an expert is cut over ranks."""
    (texts, sent, exchanges, _, scores), *_ = pool.run(4, written_and_sent, "cp=4,ep=4", 2, more)  # fmt: skip
    alone = written_and_sent("", 2, more)
    assert texts == alone[0] and scores == pytest.approx(alone[4], rel=1e-10)
    layers = SHAPE["layers"] - more.get("first_dense", 1)
    assert set(exchanges) == {2 * layers + 1}
    # a copy for each rank with an expert but the token's own, and a result for each but the next layer's
    assert sent["results"] <= sent["moved"] < 2 * sent["layers"] * 2
    assert sent["contexts"] == 3 * sent["tokens"]


@pytest.mark.parametrize(("layout", "shape", "said"), [
    ("cp=4,ep=2,dispatch=stay", {}, "cp=2,ep=2 alone"),
    ("cp=2,tp=2,ep=2,dispatch=stay", {}, "cp=2,ep=2 alone"),
    ("cp=2,ep=2,dispatch=stay", {"mixer": "linear"}, "linear or ladder"),
    ("cp=2,ep=2,dispatch=all-gather", {}, "use all-to-all or per-rank or stay"),
])  # fmt: skip
def test_what_cannot_stay_is_refused(
    layout: str, shape: dict[str, Any], said: str
) -> None:
    model = ModelShape(**SHAPE | {"experts": 4, "experts_per_token": 1} | shape)
    with pytest.raises(UsageError, match=said):
        check_layout(Layout.parse(layout), model)
