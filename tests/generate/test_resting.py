"""Experts in a file: the same bits as with all in memory, and reads that begin before attention."""

from __future__ import annotations

import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.test_mixtures import PROMPT, folder_of
from tests.conftest import Command
from tests.generate.one_text import OneText
from weft.errors import UsageError, WeftError
from weft.layout.dims import Box, Logical
from weft.layout.mesh import Mesh
from weft.memory import resting_experts, tier_file
from weft.memory.nameless_file import TierError
from weft.memory.records import Records, Slots
from weft.memory.resting_experts import RestingExperts
from weft.memory.tier_file import PAGE, TierFile
from weft.models.transformer import Transformer
from weft.models.values import Values, seeded_values
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

SMALL = {
    "vocab": 61,
    "layers": 3,
    "embed": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "init_std": 0.5,
}
SHAPES: dict[str, dict[str, Any]] = {
    "smallthinker": {"experts": 8, "experts_per_token": 2, "router_early": True, "activation": "relu"},
    "mixtral": {"experts": 8, "experts_per_token": 2},
    "deepseek": {"experts": 8, "experts_per_token": 3, "router": "sigmoid", "router_groups": 4, "router_top_groups": 2,
                 "shared_experts": 1, "first_dense": 1},
    "pyramid": {"experts": [4, 0, 8], "experts_per_token": 1, "shared_experts": 1, "shared_mix": "residual",
                "expert_ffn": 20},
}  # fmt: skip
DRAWN = seeded_values(2)
PROMPT_IDS, FOLLOWING = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3]


def whole(name: str, values: Values = DRAWN) -> Transformer:
    return parallelize(
        ModelShape(**SMALL | SHAPES[name]), Mesh.single(), Train(), values
    )[0]


def resting(
    name: str,
    folder: Path | None,
    share: float,
    ahead: bool = True,
    values: Values = DRAWN,
) -> tuple[Transformer, RestingExperts]:
    experts = RestingExperts(folder, share, ahead)
    lift = partial(experts.lift, values=values)
    return parallelize(
        ModelShape(**SMALL | SHAPES[name]), Mesh.single(), Train(), values, lift=lift
    )[0], experts


@torch.inference_mode()
def logits(model: Transformer) -> torch.Tensor:
    """Of a prompt and of each token after it."""
    reader = OneText(model)
    return torch.stack(
        [reader.read(ids) for ids in (PROMPT_IDS, *([i] for i in FOLLOWING))]
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_experts_in_memory_to_the_last_bit(
    name: str, tmp_path: Path
) -> None:
    expected = logits(whole(name))
    for share, ahead in ((0.0, True), (0.5, True), (0.5, False), (1.0, True)):
        model, experts = resting(name, tmp_path, share, ahead)
        assert torch.equal(logits(model), expected), (share, ahead)
        slots, file = experts.slots, experts.file
        assert file is not None
        assert file.bytes["read"] == slots.counts["read"] * slots.records.size
        if share == 1:
            assert slots.counts["read"] <= slots.count == slots.records.count
        if share == 0:
            assert slots.count == 1
            assert slots.counts["read"] >= 0.9 * slots.counts["used"]
        file.close()
    assert not [*tmp_path.iterdir()]


def test_what_is_stored_in_half_the_bytes_is_read_in_half_the_bytes(
    tmp_path: Path,
) -> None:
    def narrow(name: str, logical: Logical, box: Box) -> torch.Tensor:
        return DRAWN(name, logical, box).bfloat16()

    def mixed(name: str, logical: Logical, box: Box) -> torch.Tensor:
        return (
            narrow(name, logical, box)
            if "1.ffn" not in name
            else DRAWN(name, logical, box)
        )

    model, experts = resting("mixtral", tmp_path, 0.5, values=narrow)
    assert torch.equal(logits(model), logits(whole("mixtral", narrow)))
    assert experts.slots.records.size == tier_file.whole_pages(3 * 48 * 32 * 2)
    with pytest.raises(
        WeftError, match=r"stored in torch.bfloat16 and in torch.float32"
    ):
        resting("mixtral", tmp_path, 0.5, values=mixed)


def test_experts_in_the_hosts_memory() -> None:
    model, experts = resting("mixtral", None, 0.5)
    assert torch.equal(logits(model), logits(whole("mixtral")))
    assert "the host's memory" in experts.report()


@pytest.mark.parametrize("name", ["smallthinker", "mixtral"])
def test_reads_begin_before_attention(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an early router chose, all of it; of what a late one will choose, what can be guessed."""
    model, experts = resting(name, tmp_path, 1.0)
    events: list[tuple[str, int]] = []
    begin = experts.slots._begin
    monkeypatch.setattr(
        experts.slots,
        "_begin",
        lambda i, memory: (events.append(("read", i)), begin(i, memory)),
    )
    for i, block in enumerate(model.blocks.values()):
        block.attention.register_forward_pre_hook(
            lambda *_, i=i: events.append(("attention", i))
        )
        block.ffn.experts.register_forward_pre_hook(
            lambda *_, i=i: events.append(("experts", i))
        )
    with torch.inference_mode():
        OneText(model).read([7])
    for layer in range(3):
        reads = [
            at
            for at, (kind, i) in enumerate(events)
            if kind == "read" and i // 8 == layer
        ]
        before = [at for at in reads if at < events.index(("attention", layer))]
        assert 2 <= len(before) <= (2 if layer == 0 else 3), (
            "of one token, and one wrong guess of the layer before"
        )
        assert name == "mixtral" or len(reads) == len(before)
        assert all(at < events.index(("experts", layer)) for at in reads)
        if layer > 0:
            assert reads[0] < events.index(("experts", layer - 1)), (
                "what the layer before is the surest of"
            )


def test_a_prompt_has_the_next_layers_experts_read_beside_this_ones(
    tmp_path: Path,
) -> None:
    model, experts = resting("smallthinker", tmp_path, 1.0)
    begun: list[set[int]] = []
    for block in model.blocks.values():
        block.ffn.experts.register_forward_pre_hook(
            lambda *_: begun.append({i // 8 for i in experts.slots._there})
        )
    with torch.inference_mode():
        OneText(model).read(PROMPT_IDS)
    assert begun == [{0, 1}, {0, 1, 2}, {0, 1, 2}]


class Late(Records):
    """Records that come when the test lets them, or their reader waits."""

    def __init__(self, count: int) -> None:
        super().__init__(count, PAGE, None, torch.device("cpu"))
        self.under_way: list[Coming] = []
        self.unused: set[int] = set()  # since they came
        for i in range(count):
            self.write(i, torch.full((PAGE,), i, dtype=torch.uint8))

    def read(self, index: int, into: torch.Tensor) -> Any:
        into.fill_(255)
        self.unused.add(index)
        self.under_way.append(Coming(lambda: super(Late, self).read(index, into)))
        return self.under_way[-1]


class Coming:
    def __init__(self, copy: Any) -> None:
        self.copy, self.done, self.begun, self.given_up = copy, False, False, False

    def cancel(self) -> bool:
        self.given_up = not (self.begun or self.done)
        return self.given_up

    def wait(self) -> None:
        assert not self.given_up
        if not self.done:
            self.copy()
        self.done = True


def test_slots_hold_what_was_used_last_whatever_was_guessed() -> None:
    drawn = random.Random(3)
    for slots_count in (1, 2, 5, 12):
        records = Late(12)
        slots, ever = Slots(records, slots_count, torch.device("cpu")), list[int]()
        for _ in range(200):
            chosen = drawn.sample(range(12), drawn.randint(1, 8))
            slots.choose(chosen)
            slots.expect(drawn.sample(range(12), drawn.randint(0, 4)))
            under_way = [c for c in records.under_way if not c.given_up]
            for coming in drawn.sample(under_way, len(under_way) // 2):
                coming.wait()
            used = []
            for some in slots.using(chosen):
                assert len(some) == 1 or len(some) <= slots_count
                for record, memory in some:
                    assert bool((memory == record).all()), (
                        "it is there, and nothing overwrites it"
                    )
                    used.append(record)
                    records.unused.discard(record)
            assert sorted(used) == sorted(chosen)
            assert len(slots._there) + len(slots._free) == slots_count
            ever = [r for r in ever if r not in used] + used
            there = [*slots._there]
            come = [r for r in there if r in records.unused]
            assert there == come + [r for r in ever if r in there and r not in come], (
                "in the order of use"
            )
            records.under_way = [
                c for c in records.under_way if not c.done and not c.given_up
            ]
            for coming in drawn.sample(records.under_way, len(records.under_way) // 2):
                coming.begun = True


def test_what_is_there_is_used_while_others_come() -> None:
    records = Late(6)
    slots = Slots(records, 4, torch.device("cpu"))
    slots.choose([4, 1, 2, 3])
    records.under_way[2].wait()
    using = slots.using([1, 2, 3, 4])
    assert [r for r, _ in next(using)] == [2]
    assert [r for r, _ in next(using)] == [4], (
        "which is the first to come, as it was asked for first"
    )
    records.under_way[1].wait()
    records.under_way[3].wait()
    assert [r for r, _ in next(using)] == [1, 3]
    assert not [*using] and slots.counts["awaited"] == 1


def test_a_wrong_guess_that_has_not_begun_is_not_read(tmp_path: Path) -> None:
    """Two threads are held up; of what waits behind them only what was chosen comes, and the bytes are those."""
    file, hold = TierFile(tmp_path), threading.Event()
    records = Records(6, PAGE, file, torch.device("cpu"))
    buffer = tier_file.page_buffer(PAGE)
    for i in range(6):
        records.write(i, buffer.fill_(i))
    slots = Slots(records, 6, torch.device("cpu"))
    for _ in range(tier_file.THREADS):
        file.threads.submit(hold.wait)
    slots.expect([0, 1, 2, 3])
    slots.choose([2, 5])
    assert set(slots._there) == {2, 5} and len(slots._free) == 4
    hold.set()
    assert {
        i: int(memory[0]) for some in slots.using([2, 5]) for i, memory in some
    } == {2: 2, 5: 5}
    assert slots.counts["read"] == 2 and file.bytes["read"] == 2 * PAGE


def test_a_read_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = resting("mixtral", tmp_path, 0.5)

    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(tier_file.os, "preadv", fail)
    with pytest.raises(
        TierError,
        match=rf"reading [\d,]+ bytes of .*{tmp_path.name}.* failed: Input/output error",
    ):
        logits(model)


def test_a_damaged_expert_is_found(tmp_path: Path) -> None:
    file = TierFile(tmp_path)
    records = Records(3, 5000, file, torch.device("cpu"))
    assert records.region is not None
    buffer = tier_file.page_buffer(records.size)
    for i in range(3):
        records.write(i, buffer.fill_(i))
    records.region.memory[records.size + 77] = 9
    slots = Slots(records, 2, torch.device("cpu"))
    with pytest.raises(TierError, match="damaged"):
        [*slots.using([0, 1, 2])]


def test_generate_writes_the_same(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resting_experts, "LOADED", 1)  # one expert at a time
    folder, _ = folder_of("mixtral", tmp_path / "model")
    words = (
        "generate",
        "--checkpoint",
        folder,
        "--prompt",
        PROMPT,
        "--tokens",
        "9",
        "--temperature",
        "0",
    )
    code, expected, err = command(*words)
    assert code == 0, err
    code, out, err = command(
        *words, "--experts-in", tmp_path / "experts", "--resident", "0.4"
    )
    assert code == 0, err
    assert out == expected
    assert "weft: tokens used" in err
    assert "memory has room for 4 of 10" in err
    for more, said in (
        (("--experts-in", "host"), "is for models on a GPU"),
        (("--resident", "0.4"), "--resident is for --experts-in"),
        (
            ("--experts-in", "s3://bucket/experts"),
            "s3://bucket/experts is no folder of this computer",
        ),
        (
            ("--experts-in", tmp_path, "--layout", "cp=2,ep=2"),
            "ranks that have all experts",
        ),
        (("--experts-in", folder / "config.json"), "cannot be used"),
    ):
        code, _, err = command(*words, *more)
        assert code in (1, 2), err
        assert said in err, err


def test_models_without_experts_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no experts that could rest"):
        lift = partial(RestingExperts(tmp_path, 0.5).lift, values=DRAWN)
        parallelize(ModelShape(**SMALL), Mesh.single(), Train(), lift=lift)


@pytest.mark.soak
@pytest.mark.slow
def test_every_rank_of_a_long_prompt_has_its_own(
    tmp_path: Path, launched: Command
) -> None:
    folder, _ = folder_of("mixtral", tmp_path / "model")
    words = (
        "generate",
        "--checkpoint",
        folder,
        "--prompt",
        PROMPT,
        "--tokens",
        "9",
        "--temperature",
        "0",
    )
    code, expected, err = launched(*words)
    assert code == 0, err
    code, out, err = launched(
        *words, "--layout", "cp=2", "--experts-in", tmp_path / "experts"
    )
    assert code == 0, err
    assert out == expected
    assert "weft: tokens used" in err
    assert not [*(tmp_path / "experts").iterdir()]
