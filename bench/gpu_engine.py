"""The options of the generation engine on a GPU, each compared with the CPU: tokens, and log-probabilities to 1e-4.

Models of four small layers are drawn from the names of their weights, so that both devices have the same ones. Greedy
texts in float32 must be the same; where the CPU's token and the GPU's are closer than the tolerance, either will do. In
bfloat16 log-probabilities are compared to 0.3, and those of texts that are given token by token with float32 as well
(:func:`given`). Where a policy rounds values, or it or a router chooses the largest ones, the GPU's own decision
counts, except at a border (:class:`Decisions`): there it takes the CPU's, and counts these.
``bench/gpu_check.py engine`` runs these cases in a process of their own, and starts another one for those that are left
if a case takes the process or the card's context with it.

    python bench/gpu_check.py engine [--device cuda] [--seconds 75] [--only NAME ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from weft.errors import UsageError
from weft.generate.cache_policy import cache_policy_of
from weft.generate.engine import Engine
from weft.generate.request import Generation, check_generations
from weft.generate.sampling import GREEDY, Sampling
from weft.layout.mesh import Mesh
from weft.models.products import read_only
from weft.models.router import Router
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

SHAPE: dict[str, Any] = {
    "vocab": 288, "layers": 4, "embed": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 256, "tied": True,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "windows": {"window": 24, "full_every": 3},
    "linear": {"mixer": "linear"},
    "retention": {"mixer": "retention"},
    "hybrid": {"mixer": "retention", "softmax_every": 2},
    "latent": {"kv_rank": 48, "rope_dim": 16, "q_rank": 64, "value_dim": 32, "kv_heads": None},
    "wide latent": {"kv_rank": 288, "rope_dim": 32, "value_dim": 32, "kv_heads": None},
    "experts": {"experts": 4, "experts_per_token": 2},
    "relu": {"activation": "relu"},
    "odd latent": {"kv_rank": 36, "rope_dim": 6, "value_dim": 20, "kv_heads": None},
    "odd heads": {"head_dim": 20},
    "wide heads": {"head_dim": 320, "heads": 2, "kv_heads": 1},
}  # fmt: skip
NEW = 16
#: Likeliest tokens that are kept of each token, so that another device's token is among them.
KEPT = 20
#: How far log-probabilities may be apart.
NEAR = {"float32": 1e-4, "bfloat16": 0.3, "given": 1.0}
#: Seconds of a case on one device; of the first one and of others that compile kernels; and of a process's start.
CASE_S, FIRST_S, START_S = 35, 50, 30
COMPILING = ("attention paged", "attention fixed", "attention measured", "bf16 weights")


def ids_of(length: int, seed: int) -> list[int]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=drawn).tolist()


BEGINNING = ids_of(40, 1)
PROMPTS = [ids_of(5, 2), BEGINNING, [*BEGINNING, *ids_of(93, 3)], ids_of(17, 4)]
LONG = [ids_of(150, 5), ids_of(170, 6), ids_of(33, 7)]
REPEATED = [[*ids_of(7, 8)] * 8, [*ids_of(5, 9)] * 9]
HOWS = [
    Sampling(seed=1), Sampling(0.7, top_k=5, seed=2), Sampling(top_p=0.8, frequency=0.5, seed=3),
    Sampling(1.3, min_p=0.05, repetition=1.2, seed=4), Sampling(0.9, presence=0.4, bias={2: 1.0, 5: -9}, seed=5),
]  # fmt: skip


class Text(NamedTuple):
    """What was written: tokens, and of each of them its log-probability and those of the likeliest ones."""

    tokens: list[int]
    said: list[tuple[float, dict[int, float]]]


class Difference(NamedTuple):
    """How far two sides are apart. ``apart``: texts that differ where no tie was; ``ties``: those that do at a tie."""

    tokens: int
    apart: int
    ties: int
    largest: float
    where: str = ""


def values(name: str, logical: Any, box: Any) -> torch.Tensor:
    """Values of a weight, drawn from its name."""
    size = [b - a for a, b in box]
    if name.endswith("scale"):
        return torch.ones(size)
    drawn = torch.Generator().manual_seed(crc32(name.encode()))
    std = 0.06 if name.startswith("embedding") else 2 * size[-1] ** -0.5
    return torch.randn(size, generator=drawn) * std


def rounded(name: str, logical: Any, box: Any) -> torch.Tensor:
    """The same model with weights that bfloat16 holds exactly."""
    return values(name, logical, box).bfloat16().float()


def changed(name: str, logical: Any, box: Any) -> torch.Tensor:
    """The same model with another second layer."""
    own = values(name, logical, box)
    return own * 0.7 if name.startswith("blocks.1.") else own


class Side:
    """A device, with a folder for files, in which ``shared`` is that of both sides."""

    def __init__(self, device: str, folder: Path, shared: Path) -> None:
        self.device, self.folder, self.shared = device, folder, shared
        self.known: dict[str, Transformer] = {}
        self.notes: dict[str, Any] = {}

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def build(
        self, dtype: str = "float32", drawn: Any = values, lift: Any = None, **shape: Any
    ) -> Transformer:  # fmt: skip
        """A new model whose weights are not joined."""
        lifted = lift and partial(lift, values=drawn)
        own = ModelShape(**SHAPE | shape)
        model = parallelize(
            own, Mesh.single(self.device), Train(), drawn, lift=lifted, summed=False
        )[0]
        return model.to(getattr(torch, dtype)) if dtype != "float32" else model

    def model(self, dtype: str = "float32", **shape: Any) -> Transformer:
        """The model that commands generate with."""
        key = f"{dtype} {sorted(shape.items())}"
        if key not in self.known:
            self.known[key] = self.build(dtype, **shape)
            read_only(self.known[key])
        return self.known[key]

    def engine(self, model: Any = None, tokens: int = 4096, **settings: Any) -> Engine:
        given = {"graphs": True} | settings
        return Engine(model or self.model(), tokens, 64, 8, **given)


def write(
    engine: Engine, prompts: Sequence[list[int]] = PROMPTS, count: int = NEW,
    hows: Sequence[Sampling] = (GREEDY,), **more: Any,
) -> list[Text]:  # fmt: skip
    """Texts that are written together."""
    settings: dict[str, Any] = {"top": KEPT} | more
    texts = [
        engine.submit(prompt, count, hows[i % len(hows)], **settings)[0]
        for i, prompt in enumerate(prompts)
    ]
    engine.run()
    return texts_of(texts)


def texts_of(texts: Sequence[Generation]) -> list[Text]:
    check_generations(texts)
    return [
        Text(text.written, [(p, dict(top)) for p, top in text.log_probabilities])
        for text in texts
    ]


def difference(ours: Sequence[Text], theirs: Sequence[Text], near: float) -> Difference:
    """Compare texts, and log-probabilities as long as the texts are the same."""
    apart = ties = tokens = 0
    largest, where = 0.0, ""
    if len(ours) != len(theirs):
        return Difference(0, 1, 0, math.inf, f"{len(ours)} and {len(theirs)} texts")
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        pairs = [*zip(a.tokens, b.tokens, strict=False)]
        same = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
        tokens += same
        compared = len(a.said) if a.tokens == b.tokens else same
        gaps = [abs(x[0] - y[0]) for x, y in zip(a.said[:compared], b.said[:compared], strict=False)]  # fmt: skip
        largest = max([largest, *(math.inf if math.isnan(gap) else gap for gap in gaps)])  # fmt: skip
        if a.tokens == b.tokens:
            continue
        gap = math.inf
        if same < min(len(a.said), len(pairs)):
            own, likeliest = a.said[same]
            gap = own - likeliest.get(b.tokens[same], -math.inf)
        ties, apart = ties + (gap < near), apart + (gap >= near)
        if gap >= near and not where:
            where = f"text {number} at {same} of {len(a.tokens)}, gap {gap:.1e}"
    return Difference(tokens, apart, ties, largest, where)


def need(holds: Any, said: str) -> None:
    if not holds:
        raise AssertionError(said)


def alike(ours: Sequence[Text], theirs: Sequence[Text], said: str, near: float = 1e-4) -> None:  # fmt: skip
    """Raise if two runs on one device differ."""
    apart = difference(ours, theirs, near)
    need(not apart.apart and apart.largest < near, f"{said}: {apart}")


def kind(
    side: Side, kind: str = "", dtype: str = "float32", attention: str = "", **settings: Any
) -> list[Text]:  # fmt: skip
    """Texts of a kind of layers, alone."""
    model = side.model(dtype, **KINDS.get(kind, {}))
    own = attention if side.on_gpu or attention in ("gathered", "fixed") else ""
    engine = side.engine(model, attention=own, **settings)
    decoding = getattr(engine.reader, "decoding", None)
    side.notes["graphs"] = decoding is not None
    texts = write(engine)
    # a prefix that is known already, and one that ends within a block
    return [*texts, *write(engine, [PROMPTS[2], PROMPTS[2][:100]])]


class Decisions(TorchFunctionMode):
    """Roundings and choices of the largest values in a policy, which depend on the last digits of values at a border.
    A rounding that falls otherwise changes a key by a 127th of its largest element, a choice leaves a token out; both
    are far more than two devices' kernels differ by, and are a reason for further ones in the next layers.

    The first side keeps its decisions in ``file``. The second one takes those in place of its own where both are right
    to within ``STEP`` of a rounding's step, or ``share`` of the chosen values: these are counted in ``border``, and may
    be ``most`` of all. Where its own value is clearly on another side it keeps its own decision, which is counted in
    ``beyond`` and is a fault.
    """

    STEP = 0.01

    def __init__(self, file: Path, share: float = 1e-3, most: float = 0.005) -> None:
        super().__init__()
        self.file, self.decided = file, list[torch.Tensor]()
        self.share, self.most = share, most
        self.earlier = torch.load(file) if file.exists() else None
        self.numbers = dict.fromkeys(("rounded", "chosen"), 0)
        self.border, self.beyond = dict(self.numbers), dict(self.numbers)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        got = func(*args, **(kwargs or {}))
        if func is torch.Tensor.round:
            return self._rounded(args[0], got)
        if func is torch.Tensor.topk:
            return self._chosen(args[0], got)
        return got

    def _other(self, own: torch.Tensor) -> torch.Tensor:
        """Keep a decision, and return the other side's."""
        self.decided.append(own.cpu())
        if self.earlier is None:
            return own
        at = len(self.decided) - 1
        need(at < len(self.earlier), "the sides decide unequally often")
        other = self.earlier[at].to(own.device)
        need(other.shape == own.shape, f"decision {at}: {own.shape}, {other.shape}")
        return other

    def _rounded(self, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        other = self._other(own)
        near = (x - other).abs() < 0.5 + self.STEP
        self._count("rounded", own != other, near)
        return torch.where(near, other, own)

    def _chosen(self, x: torch.Tensor, own: Any) -> Any:
        """``x``: values; ``own``: the largest of the last dimension, and where they are."""
        other = self._other(own.indices)
        sides = torch.zeros_like(x, dtype=torch.bool).scatter(-1, other, True)
        ours = torch.zeros_like(sides).scatter(-1, own.indices, True)
        least = own.values[..., -1:]
        near = (x - least).abs() <= self.share * least.abs()
        apart = sides != ours
        self._count("chosen", apart, near)
        # of the same ones, the order does not count
        taken = (near | ~apart).all(-1, keepdim=True)
        indices = torch.where(taken, other, own.indices)
        return torch.return_types.topk((x.gather(-1, indices), indices))

    def _count(self, what: str, apart: torch.Tensor, near: torch.Tensor) -> None:
        self.numbers[what] += apart.numel()
        self.border[what] += int((apart & near).sum())
        self.beyond[what] += int((apart & ~near).sum())

    def watch(self, engine: Engine) -> None:
        """Take part in what the selectors of ``engine`` decide."""

        reader: Any = engine.reader
        for pages in reader.pages:
            # not "attend", whose kernels may be compiled
            for name in ("written", "copied", "_choose"):
                method = getattr(pages.selector, name)
                setattr(pages.selector, name, self._inside(method))

    def _inside(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            with self:
                return method(*args, **named)

        return call

    @contextlib.contextmanager
    def routing(self, model: Transformer) -> Iterator[None]:
        """Take part in which experts the routers of ``model`` choose inside this context."""
        routers: list[Any] = [m for m in model.modules() if isinstance(m, Router)]
        for router in routers:
            router._best = self._inside(router._best)
        try:
            yield
        finally:
            for router in routers:
                del router._best

    def finish(self, notes: dict[str, Any]) -> None:
        """Keep the first side's decisions; check the second's: there may be few at a border, and none beyond."""
        if self.earlier is None:
            torch.save(self.decided, self.file)
            return
        need(len(self.decided) == len(self.earlier), "the sides decide unequally often")
        for what, number in self.numbers.items():
            border, beyond = self.border[what], self.beyond[what]
            if number:
                notes[what] = f"{border} at a border, {beyond} beyond, of {number}"
            few = border <= 2 + self.most * number
            need(few, f"{what}: {border} at a border of {number}")
            need(
                not beyond, f"{what}: {beyond} otherwise, beyond a border, of {number}"
            )


#: The token that given texts repeat: a bias makes it the likeliest one, and reported log-probabilities leave it out.
REPEATS = Sampling(0, bias={7: 1000.0})


def given(side: Side, kind: str = "", dtype: str = "bfloat16", attention: str = "") -> list[Text]:  # fmt: skip
    """Log-probabilities of prompts and of a repeated token after them: all passes read the same tokens in any type.

    The weights are numbers of bfloat16, and routes those of float32. The error of ``dtype`` is the norm of its
    differences from float32 on the same device. On the GPU it may be 1.5 times the CPU's at most.
    """
    said: dict[str, list[Text]] = {}
    name = f"given {kind or 'plain'} {attention}".strip().replace(" ", "-")
    own = attention if side.on_gpu else ""
    for each in ("float32", dtype):
        model = side.build(each, rounded, **KINDS.get(kind, {}))
        read_only(model)
        # routes are float32's in all types, or a few that bfloat16 takes otherwise would decide the error
        limits = (1e-3, 0.005) if each == "float32" else (math.inf, 0.05)
        choices = Decisions(side.shared / f"{name}.pt", *limits)
        with choices.routing(model):
            engine = side.engine(model, attention=own)
            texts = [
                engine.submit(prompt, NEW, REPEATS, top=KEPT, scored=True)[0]
                for prompt in (*PROMPTS, *LONG)
            ]
            engine.run()
        if choices.decided:
            choices.finish(side.notes)
        check_generations(texts)
        need(all({*t.written} == {7} for t in texts), "a text went its own way")
        scores = [Text(t.written, [*t.prompt_scores, *t.log_probabilities]) for t in texts]  # fmt: skip
        said[each] = [Text([], [(p, {}) for p, _ in text.said]) for text in scores]
    exact, rough = (
        torch.tensor([p for text in said[each] for p, _ in text.said], dtype=torch.float64)
        for each in ("float32", dtype)
    )  # fmt: skip
    error, largest = (rough - exact).norm() / len(exact) ** 0.5, (rough - exact).abs().max()  # fmt: skip
    side.notes["off"] = float(error)
    file = side.shared / f"{name}.error"
    if file.exists():
        cpu = float(file.read_text())
        side.notes |= {"cpu_off": cpu, "most_off": float(largest)}
        need(error <= 1.5 * cpu, f"error {error:.1e}, on the CPU {cpu:.1e}")
    else:
        file.write_text(str(float(error)))
    return said[dtype]


def policy(side: Side, word: str, tokens: int = 4096, dtype: str = "float32") -> list[Text]:  # fmt: skip
    engine = side.engine(side.model(dtype), tokens, cache_policy=cache_policy_of(word))
    decisions = None
    if word.startswith("alisa") and word != "alisa:1":
        decisions = Decisions(side.shared / f"{word.replace(':', '_')}.pt")
        decisions.watch(engine)
    texts = write(engine, LONG, 24)
    if decisions is not None:
        decisions.finish(side.notes)
    usage = engine.policy_usage()
    side.notes["seen"] = round(usage.chosen / max(1, usage.keys), 3)
    side.notes["moved"] = usage.moved
    need(tokens > 1000 or usage.moved, "no block has moved to the host")
    if word in ("alisa:1", "blocks:1", "window:1024"):
        whole, near = write(side.engine(side.model(dtype)), LONG, 24), NEAR[dtype]
        alike(whole, texts, "a policy that leaves nothing out", near)
    return texts


def looked_up(side: Side, word: str, hows: Sequence[Sampling] = (GREEDY,)) -> list[Text]:  # fmt: skip
    """Guesses from texts."""
    from weft.generate.drafter import drafter_for

    model = side.model()
    engine = side.engine(drafter=drafter_for(word, model, print))
    texts = write(engine, REPEATED, 32, hows)
    alike(write(side.engine(), REPEATED, 32, hows), texts, "with guesses")
    return texts


def guessed(
    side: Side, ahead: int = 0, early: int = 0, hows: Sequence[Sampling] = (GREEDY,)
) -> list[Text]:
    """Guesses of a small model, whose layers are the first ones of the large one."""
    from weft.techniques.drafters.small_model import DraftModel

    drafter = DraftModel(side.model(layers=2), 4, ahead, 4096, early)
    texts = write(side.engine(drafter=drafter), PROMPTS[:2], NEW, hows)
    side.notes["guesses"] = f"{drafter.ready} of {drafter.needed} ready"
    if hows == (GREEDY,):
        alike(write(side.engine(), PROMPTS[:2], NEW), texts, "with guesses")
    return texts


def grammar(side: Side) -> list[Text]:
    from weft.data.tokenizer import load_tokenizer
    from weft.generate.grammar import Grammars

    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    grammars = Grammars(load_tokenizer("bytes"), SHAPE["vocab"])
    of = grammars.compile("json", schema)
    engine = side.engine()
    hows = (GREEDY, Sampling(seed=3), Sampling(top_p=0.9, seed=4))
    return write(engine, PROMPTS[:3], 24, hows, grammar=of, least=3)


def adapter_in(folder: Path, model: Transformer, rank: int, seed: int) -> Path:
    """An adapter as PEFT writes it."""
    from safetensors.torch import save_file

    from weft.checkpoint.convert.peft import peft_name
    from weft.models.row_adapters import layer_modules

    if folder.is_dir():
        return folder
    drawn, tensors = torch.Generator().manual_seed(seed), {}
    targets = ("wq", "wv", "wo", "gate", "down")
    for number, modules in enumerate(layer_modules(model)):
        for module, projections in modules.items():
            for name, logical in projections.logical.items():
                if name in targets:
                    out, into = logical.shape
                    path = peft_name(f"blocks.{number}.{module}.adapters.{name}.a")
                    other = peft_name(f"blocks.{number}.{module}.adapters.{name}.b")
                    a = torch.randn(rank, into, generator=drawn)
                    b = torch.randn(out, rank, generator=drawn)
                    tensors[path], tensors[other] = a / into**0.5, b / rank**0.5
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*targets]}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def adapters(side: Side, dtype: str = "float32") -> list[Text]:
    from weft.checkpoint.convert.peft import read_adapter

    engine = side.engine(side.model(dtype))
    for number, rank in enumerate((4, 8)):
        folder = adapter_in(side.shared / f"a{number}", side.build(), rank, number)
        engine.add_adapter(f"a{number}", read_adapter(folder, engine.model))
    texts = [
        engine.submit(prompt, NEW, GREEDY, top=KEPT, adapter=name)[0]
        for prompt, name in zip(PROMPTS, ("", "a0", "a1", "a0"), strict=True)
    ]
    engine.run()
    return texts_of(texts)


def exported(folder: Path, drawn: Any = values, **shape: Any) -> Path:
    """A folder with a model, as transformers reads it."""
    from weft.models.hugging_face import export

    if not folder.is_dir():
        model = Side("cpu", folder, folder).build(drawn=drawn, **shape)
        export(dict(model.named_parameters()), model.shape, folder)
    return folder


def family(side: Side, form: str = "float") -> list[Text]:
    """A base and a fine-tune that shares three of four layers."""
    from weft.checkpoint.model_family import ModelFamily
    from weft.models.shared_weights import chain_of

    base = ModelFamily(side.build(), form)
    member = base.member(exported(side.shared / "tuned", changed), None)
    tuned, engine = base.open(member), side.engine(base.base)
    engine.add_model("tuned", tuned, member.digest)
    same = [a == b for a, b in zip(chain_of(base.base), chain_of(tuned), strict=True)]
    need(sum(same) == len(same) - 1, f"modules that are shared: {same}")
    texts = [
        engine.submit(prompt, NEW, GREEDY, top=KEPT, adapter=name)[0]
        for prompt, name in zip(PROMPTS, ("", "tuned", "tuned", ""), strict=True)
    ]
    engine.run()
    alone = side.build(drawn=changed)
    alike(write(side.engine(alone), PROMPTS[1:3]), texts_of(texts[1:3]), "beside others")  # fmt: skip
    return texts_of(texts)


def together(side: Side) -> list[Text]:
    """Two models that write texts together, as weft experts mixes them."""
    from weft.generate.expert_engine import ExpertEngine
    from weft.train.expert_join import BayesRouter
    from weft.train.expert_set import OpenedExperts

    tuned = side.build(drawn=changed)
    read_only(tuned)
    models = side.model(), tuned
    experts = OpenedExperts(models, {}, None, BayesRouter((1.0, 1.0)))  # type: ignore[arg-type]
    return write(ExpertEngine(experts, models[0], 4096, 64, 8, graphs=True))


def kept(side: Side, where: str, kind: str = "") -> list[Text]:
    """Blocks that one engine has computed and another fetches from the host's memory or from files."""
    from weft.generate.block_source import HostBlocks
    from weft.generate.outside_cache import OutsideCache, keep_blocks

    model, lines = side.model(**KINDS.get(kind, {})), list[str]()
    memory, folder = HostBlocks(1 << 28), side.folder / "kept"
    first, second = side.engine(model), side.engine(model)
    if where == "memory":
        OutsideCache(first, memory, "model", 60.0, lines.append)
    else:
        keep_blocks(first, "model", 0, folder, 1 << 30, lines.append)
    expected = write(first, LONG)
    if where == "memory":
        cache = OutsideCache(second, memory, "model", 60.0, lines.append)
    else:
        first.close()
        cache = keep_blocks(second, "model", 0, folder, 1 << 30, lines.append)
    texts = write(second, LONG)
    side.notes["fetched"] = cache.fetched
    need(cache.fetched and not lines, f"{cache.fetched} blocks fetched; {lines}")
    alike(expected, texts, "with blocks that were fetched")
    second.close()
    return texts


def migrated(side: Side, streamed: bool = False, kind: str = "") -> list[Text]:
    """A request that begins in one engine and ends in another."""
    from weft.generate.migration import Arrival, Departure, MoveFrame

    def wired(frame: MoveFrame) -> MoveFrame:
        payload = memoryview(bytearray(b"".join(frame.payload)))
        return MoveFrame(json.loads(json.dumps(frame.head)), [payload])

    model = side.model(**KINDS.get(kind, {}))
    source, target = side.engine(model), side.engine(model)
    (text,) = source.submit(PROMPTS[2], NEW, GREEDY, top=KEPT)
    departure, arrival = Departure(source, text), Arrival(target)
    if streamed:
        departure.stream(lambda frame: arrival.keep(wired(frame)))
    for _ in range(6):
        source.step()
    while (frame := departure.round()) is not None:
        arrival.take(wired(frame))
        source.step()
    moved = arrival.take(wired(departure.leave()))
    need(moved is not None, "the request has not arrived")
    assert moved is not None
    target.run()
    said = [(p, {int(i): x for i, x in top.items()}) for p, top in moved.log_probabilities]  # fmt: skip
    return [Text(moved.written, said)]


class LocalLender:
    """A lender in this process."""

    def __init__(self, office: Any) -> None:
        self.office, self.asked = office, 0

    def room(self) -> int:
        return int(self.office.room())

    def recalled(self) -> list[int]:
        return list(self.office.recalled("here"))

    def take(self, contents: torch.Tensor) -> int:
        return int(self.office.take(contents, "here"))

    def fetch(self, loan: int) -> torch.Tensor:
        return self.office.fetch(loan)

    def drop(self, loan: int) -> None:
        self.office.drop(loan)

    def ask(self, layer: int, queries: Any, q: torch.Tensor, window: int) -> Any:
        self.asked += 1
        both = self.office.attend(layer, queries, q, window)
        return lambda: both


def borrowed(side: Side, dtype: str = "float32") -> list[Text]:
    """A text of 316 tokens in a cache of 160, whose other blocks lie at another engine."""
    from weft.generate.lending import Borrower, LoanOffice

    model = side.model(dtype)
    own, other = side.engine(model, 160), side.engine(model, 1024)
    lender = LocalLender(LoanOffice(other))
    borrower = Borrower(own, lambda: [lender], 40)
    (text,) = own.submit(ids_of(300, 11), NEW, GREEDY, top=KEPT)
    for _ in range(2000):
        own.step()
        other.step()
        if text.finished:
            break
    borrower.settle()
    side.notes["asked"] = lender.asked
    need(lender.asked, "nothing was asked of the lender")
    return texts_of([text])


def beams(side: Side) -> list[Text]:
    from weft.generate.beam_search import Search

    ended = Search(side.engine(), PROMPTS[1], 10, 4).run()
    return [Text(each.ids, [(each.log_probability, {})]) for each in ended]


def workers(side: Side, dtype: str = "float32") -> list[Text]:
    """Texts that see each other while they are written (Hogwild)."""
    from weft.generate.joined_texts import hogwild

    engine = side.engine(side.model(dtype))
    some = hogwild(engine, PROMPTS[1], [ids_of(4, 12), ids_of(6, 13)], 12, GREEDY)
    # in bfloat16 the sides may write different texts, and these keep no log-probabilities
    return [Text(each.written, []) for each in some] if dtype == "float32" else []


def resting(side: Side, what: str) -> list[Text]:
    """Layers, neurons or experts that are read when they compute."""
    from weft.memory.resting_experts import RestingExperts
    from weft.memory.resting_layers import RestingLayers
    from weft.memory.resting_neurons import RestingNeurons

    folder = side.folder / what.replace(" ", "-")
    folder.mkdir(exist_ok=True)
    parts: dict[str, tuple[str, Callable[[], Any]]] = {
        "layers": ("", lambda: RestingLayers(folder, 2)),
        "neurons": ("relu", lambda: RestingNeurons(folder, 0.5)),
        "experts in files": ("experts", lambda: RestingExperts(folder, 0.5)),
        "experts in memory": ("experts", lambda: RestingExperts(None, 0.5)),
    }
    kind, part = parts[what]
    model = side.build(lift=part().lift, **KINDS.get(kind, {}))
    read_only(model)
    texts = write(side.engine(model))
    expected = write(side.engine(side.model(**KINDS.get(kind, {}))))
    alike(expected, texts, "with all in memory")
    return texts


def seeds(side: Side) -> list[Text]:
    """Drawn texts with and without graphs, alone and beside others."""
    engine = side.engine()
    engine.record_steps()
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(HOWS))]
    texts = write(engine, prompts, NEW, HOWS)
    alike(texts, write(side.engine(graphs=False), prompts, NEW, HOWS), "without graphs")
    alone = [
        write(engine, [prompt], NEW, [how])[0]
        for prompt, how in zip(prompts, HOWS, strict=True)
    ]
    alike(texts, alone, "alone")
    return texts


def renewed(side: Side) -> list[Text]:
    """Weights that change in place between two texts, and while a third one is written."""
    model = side.build()
    engine = side.engine(model)
    first = write(engine)
    (text,) = engine.submit(PROMPTS[3], NEW, GREEDY, top=KEPT)
    for _ in range(5):
        engine.step()
    engine.drain()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                p.mul_(0.8 if "blocks" in name else 1.1)
    engine.weights_changed(1)
    engine.run()
    second = write(engine)
    alike(write(side.engine(model)), second, "as a new engine")
    need(second != first, "the weights have not changed anything")
    return [*first, *second, *texts_of([text])]


def regrown(side: Side) -> list[Text]:
    """Steps that are recorded while the cache grows, which makes the recordings before useless."""
    engine = Engine(side.model(), None, 64, 8)
    engine.record_graphs()
    texts = [*write(engine), *write(engine, LONG, 40), *write(engine)]
    alike(write(side.engine(graphs=False)), texts[:4], "without graphs")
    alike(texts[:4], texts[-4:], "after the cache has grown")
    decoding = getattr(engine.reader, "decoding", None)
    side.notes["graphs"] = decoding is not None
    return texts


def threads(side: Side) -> list[Text]:
    """Three engines that record and write at the same time, each in a thread of its own with a model of its own."""
    from concurrent.futures import ThreadPoolExecutor

    from weft.generate.thread_device import use_device

    models = [side.build() for _ in range(3)]
    for model in models:
        read_only(model)
    engines = [side.engine(model) for model in models]

    def written(engine: Engine) -> list[Text]:
        use_device(engine.model.mesh.device)
        return write(engine, [*PROMPTS, *LONG])

    with ThreadPoolExecutor(3) as pool:
        every = [*pool.map(written, engines)]
    for other in every[1:]:
        alike(every[0], other, "two threads")
    return every[0]


def scored(side: Side) -> list[Text]:
    """Log-probabilities of prompts and of the five likeliest tokens."""
    engine = side.engine()
    texts = [
        engine.submit(prompt, NEW, how, top=5, scored=True)[0]
        for prompt, how in zip(PROMPTS, (GREEDY, *HOWS), strict=False)
    ]
    engine.run()
    check_generations(texts)
    written = texts_of(texts)
    prompts = [Text([], [(p, {}) for p, _ in text.prompt_scores]) for text in texts]
    every = [
        Text([], [(p, {}) for p in sorted(top.values())])
        for text in texts
        for _, top in text.log_probabilities
    ]
    return [*written, *prompts, *every]


def choices(side: Side, dtype: str) -> list[Text]:
    """The tokens that 64 rows of the same logits give."""
    from weft.generate.row_sampling import TextState, choose_tokens
    from weft.generate.token_counts import TokenCounts

    drawn, rows, vocab = torch.Generator().manual_seed(3), 64, 5000
    logits = torch.randn(rows, vocab, dtype=torch.float64, generator=drawn) * 3
    numbers = torch.rand(rows, dtype=torch.float64, generator=drawn).tolist()
    every = [GREEDY, *HOWS, Sampling(0.9, top_p=0.95, min_p=0.02), Sampling(1.2, top_k=300, top_p=0.7)]  # fmt: skip
    texts = []
    for row, number in enumerate(numbers):
        how = every[row % len(every)]
        counts = TokenCounts(ids_of(30, row), ids_of(40, row + 99)) if how.penalises else None  # fmt: skip
        allowed = torch.rand(vocab, generator=drawn) < 0.3 if row % 5 == 0 else None
        texts.append(TextState(how, number, counts, allowed, (1, 2) if row % 7 == 0 else ()))  # fmt: skip
    given = logits.to(getattr(torch, dtype)).to(side.device)
    return [Text([token], []) for token in choose_tokens(given, texts)]


def crowded(side: Side) -> list[Text]:
    """A cache that is too small for all texts, and several texts of one prompt."""
    engine = side.engine(tokens=256)
    texts = engine.submit(PROMPTS[2], NEW, Sampling(seed=7), n=3, top=KEPT)
    texts += [engine.submit(prompt, 40, GREEDY, top=KEPT)[0] for prompt in LONG]
    engine.run()
    side.notes["preempted"] = engine.scheduler.preemptions
    need(engine.scheduler.preemptions, "every text had room")
    return texts_of(texts)


def embedded(side: Side) -> list[Text]:
    reader: Any = side.engine().reader
    with torch.inference_mode():
        both = [reader.embed(PROMPTS[1], last) for last in (False, True)]
    return [Text([], [(x, {}) for x in each.tolist()]) for each in both]


def narrow(side: Side) -> list[Text]:
    """``--weights bfloat16``."""
    model = side.build()
    read_only(model, "bfloat16")
    return write(side.engine(model))


def refused(side: Side, what: str) -> list[Text]:
    """What is for the CPU alone is refused on a GPU, in one line."""
    from weft.generate.shared_model import share_model

    model = side.build()
    ways: dict[str, Callable[[], Any]] = {
        "invariant": lambda: Engine(model, 1024, invariant=True),
        "split": lambda: share_model(model),
    }
    try:
        ways[what]() if what in ways else read_only(model, what)
    except UsageError as error:
        need(side.on_gpu, f"refused on the CPU: {error}")
        side.notes["refused"] = str(error)
    else:
        need(not side.on_gpu, "it was not refused")
    return []


def opened(side: Side, draft: bool = False) -> list[Text]:
    """What ``weft serve`` opens, with most options at once."""
    from weft.generate.open_engine import EngineOptions, open_engine

    base = exported(side.shared / "base")
    small = exported(side.shared / "small", layers=2)
    folder = side.shared / "adapters"
    adapter_in(folder / "extra", side.build(), 4, 5)
    options = EngineOptions(
        checkpoint=str(base), requests=8, waiting=8, budget=64, policy="exact-fill", cache=0,
        adapters=None if draft else folder, models=None, ema=False, weights="float", invariant=False,
        draft=str(small) if draft else "", ahead=2 if draft else 0, early_layer=2 if draft else 0, plugins=(),
        layout="", host_cache=0.05, cache_folder=side.folder / "serve", cache_policy="none" if draft else "blocks:0.5",
    )  # fmt: skip
    options.check()
    lines = list[str]()
    ready = open_engine(options, side.device, "base", lines.append, 0.002)
    assert ready is not None
    side.notes["cache"] = ready.cache
    name = "" if draft else "extra"
    texts = [*write(ready.engine, LONG), *write(ready.engine, LONG[:1], adapter=name)]
    ready.engine.close()
    need(not any("cannot be used" in line for line in lines), f"{lines}")
    return texts


BF16 = "bfloat16"
CASES: dict[str, Callable[[Side], list[Text]]] = {
    "plain": kind,
    **{f"attention {name}": partial(kind, attention=name) for name in ("gathered", "paged", "fixed", "measured")},
    **{name: partial(kind, kind=name) for name in ("windows", "retention", "hybrid", "linear", "latent", "experts")},
    **{name: partial(kind, kind=name) for name in ("wide latent", "odd latent", "odd heads", "wide heads")},
    "window 32": partial(policy, word="window:32"),
    "window 1024": partial(policy, word="window:1024"),
    "blocks 1": partial(policy, word="blocks:1"),
    "blocks 0.25": partial(policy, word="blocks:0.25"),
    "alisa 1": partial(policy, word="alisa:1"),
    "alisa 0.25": partial(policy, word="alisa:0.25"),
    "alisa query": partial(policy, word="alisa:0.25:query"),
    "alisa int8": partial(policy, word="alisa:0.25:int8:prompts"),
    "alisa host": partial(policy, word="alisa:0.5:host=4096", tokens=256),
    "alisa host query": partial(policy, word="alisa:0.5:host=4096:query", tokens=256),
    "alisa host int8": partial(policy, word="alisa:0.5:host=4096:query:int8", tokens=256),
    "draft text": partial(looked_up, word="text"),
    "draft texts": partial(looked_up, word="texts", hows=HOWS),
    "draft model": guessed,
    "draft drawn": partial(guessed, hows=HOWS[:2]),
    "draft ahead": partial(guessed, ahead=2),
    "mirror": partial(guessed, ahead=2, early=2),
    "grammar": grammar,
    "adapters": adapters,
    "family": family,
    "together": together,
    "kept memory": partial(kept, where="memory"),
    "kept files": partial(kept, where="files"),
    "kept hybrid": partial(kept, where="files", kind="hybrid"),
    "migrated": migrated,
    "migrated stream": partial(migrated, streamed=True),
    "migrated hybrid": partial(migrated, kind="hybrid"),
    "borrowed": borrowed,
    "beams": beams,
    "hogwild": workers,
    "seeds": seeds,
    "renewed": renewed,
    "regrown": regrown,
    "threads": threads,
    "scored": scored,
    "choices 64": partial(choices, dtype="float64"),
    "choices 32": partial(choices, dtype="float32"),
    "crowded": crowded,
    "embedded": embedded,
    "layers in": partial(resting, what="layers"),
    "neurons in": partial(resting, what="neurons"),
    "experts in files": partial(resting, what="experts in files"),
    "experts in memory": partial(resting, what="experts in memory"),
    "opened": opened,
    "opened draft": partial(opened, draft=True),
    **{f"refused {what}": partial(refused, what=what) for what in ("int8", "int4", "sparse:0.6", "invariant", "split")},
    "bf16 weights": narrow,
    "bf16 plain": partial(kind, dtype=BF16),
    "bf16 wide latent": partial(kind, kind="wide latent", dtype=BF16),
    "bf16 hybrid": partial(kind, kind="hybrid", dtype=BF16),
    "given": given,
    **{f"given {name}": partial(given, kind=name) for name in KINDS if name != "relu"},
    **{f"given {name}": partial(given, attention=name) for name in ("gathered", "fixed")},
    "bf16 blocks": partial(policy, word="blocks:1", dtype=BF16),
    "bf16 alisa": partial(policy, word="alisa:1", dtype=BF16),
    "bf16 adapters": partial(adapters, dtype=BF16),
    "bf16 borrowed": partial(borrowed, dtype=BF16),
    "bf16 hogwild": partial(workers, dtype=BF16),
}  # fmt: skip


class CaseLate(Exception):
    """Raised in a case that takes too long."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Return a context that raises :class:`CaseLate` in the main thread after ``seconds``."""

    def late(number: int, frame: Any) -> None:
        raise CaseLate(f"no end after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_case(name: str, sides: Sequence[Side], limit: float) -> dict[str, Any]:
    """Run a case on both sides; return its row."""
    texts, row = [], dict[str, Any]()
    kind = {"bf16": "bfloat16", "give": "given"}.get(name[:4], "float32")
    near = NEAR[kind]
    for side in sides:
        side.notes, began = {}, time.perf_counter()
        try:
            with limited(limit):
                texts.append(CASES[name](side))
                if side.on_gpu:
                    torch.cuda.synchronize()
        except Exception as error:
            error.add_note(side.device)
            raise
        label = "seconds" if side is sides[-1] else "cpu_seconds"
        row[label] = round(time.perf_counter() - began, 2)
    apart = difference(*texts, near)
    ok = not apart.apart and apart.largest < near
    # a draw in float32 may fall on the border of two tokens
    ok = ok or (name == "choices 32" and apart.apart == 1)
    return {"case": name, "ok": ok, **apart._asdict(), **row, **sides[-1].notes}


def failure(name: str, error: BaseException, seconds: float) -> dict[str, Any]:
    every = traceback.extract_tb(error.__traceback__)
    # the last line of Weft's own says more than PyTorch's
    ours = [frame for frame in every if "/torch/" not in frame.filename]
    last = (ours or every)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    said = " ".join(str(error).split())[:300]
    device = "".join(getattr(error, "__notes__", ())[-1:])
    text = f"FAILED {type(error).__name__} on {device} at {where}: {said}"
    return {"case": name, "ok": False, "error": text, "seconds": round(seconds, 2)}


def show(row: dict[str, Any], file: Path) -> None:
    text = row.get("error")
    if text is None:
        known = (*Difference._fields, "case", "ok", "seconds")
        others = {key: value for key, value in row.items() if key not in known}
        text = (
            f"{'equal' if row['ok'] else 'DIFFERENT'} {row['tokens']} tokens, {row['apart']} apart, "
            f"{row['ties']} ties, "
            f"log-probability {row['largest']:.1e} {row['where']} {others}"
        )
    print(f"{row['case']:<18}{row.get('seconds', 0):6.1f} s  {text}", flush=True)
    with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def cases_here(names: Sequence[str], device: str, seconds: float, file: Path) -> None:
    """Run the cases ``names`` one after the other in this process."""
    faulthandler.enable()
    ends = time.monotonic() + seconds
    torch.set_float32_matmul_precision("highest")
    torch.set_num_threads(min(4, torch.get_num_threads()))
    with tempfile.TemporaryDirectory() as temporary:
        sides = []
        for name, of in (("cpu", "cpu"), ("other", device)):
            folder = Path(temporary, name)
            folder.mkdir()
            sides.append(Side(of, folder, Path(temporary)))
        for name in names:
            began = time.monotonic()
            if began > ends:
                row = {"case": name, "ok": None, "error": "not begun: no time"}
                show(row, file)
                continue
            try:
                slow = name == names[0] or name in COMPILING
                row = run_case(name, sides, FIRST_S if slow else CASE_S)
            except Exception as error:
                row = failure(name, error, time.monotonic() - began)
                lost = "CUDA error" in str(error) or "AcceleratorError" in row["error"]
                if lost or isinstance(error, CaseLate):
                    show(row, file)
                    os._exit(3)  # nothing more can be computed here
            show(row, file)


def engine_part(names: Sequence[str] | None, device: str, seconds: float, file: Path) -> None:  # fmt: skip
    """Run the cases ``names`` (None: all) in processes of their own, of which each goes on where the last has ended."""
    ends = time.monotonic() + seconds
    unknown = [name for name in names or () if name not in CASES]
    if unknown:
        raise SystemExit(f"no such case: {', '.join(unknown)}; give {', '.join(CASES)}")
    left, begun = [*(names or CASES)], 0
    if file.exists():
        begun = len(file.read_text().splitlines())
    while left:
        if time.monotonic() > ends:
            for name in left:
                show({"case": name, "ok": None, "error": "not begun: no time"}, file)
            return
        command = [
            sys.executable, __file__, "--device", device, "--json", str(file),
            "--seconds", str(max(1.0, ends - time.monotonic())), "--only", *left,
        ]  # fmt: skip
        child = subprocess.Popen(command)
        rows, changed_at = list[str](), time.monotonic()
        while child.poll() is None:
            now = file.read_text().splitlines()[begun:] if file.exists() else []
            if len(now) > len(rows):
                rows, changed_at = now, time.monotonic()
            silent = FIRST_S + (3 if rows else START_S)
            if time.monotonic() > changed_at + silent:
                child.send_signal(signal.SIGABRT)  # it says where it was
                time.sleep(2)
                child.kill()
            time.sleep(0.1)
        rows = file.read_text().splitlines()[begun:] if file.exists() else []
        ran = [json.loads(row)["case"] for row in rows]
        begun += len(rows)
        left = [name for name in left if name not in ran]
        if left and (not ran or child.returncode != 3):
            why = f"FAILED: its process ended with {child.returncode}"
            show({"case": left.pop(0), "ok": False, "error": why}, file)
            begun += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--seconds", type=float, default=75)
    parser.add_argument("--json", type=Path, default=Path("/tmp/gpu_check.jsonl"))
    args = parser.parse_args()
    cases_here(args.only or [*CASES], args.device, args.seconds, args.json.resolve())


if __name__ == "__main__":
    main()
