"""A study of adaptive depth and width: which modules each token should take at a budget (Duo-LLM, 2410.10846).

A path says which module a token takes in each layer. Its cost is that of its modules, as a share of the big ones. An
oracle knows the loss of every path for each token and takes the best one within the budget; a router is trained to say
it beforehand; both are compared with random paths and with the best path for all tokens alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from weft.errors import UsageError
from weft.models.rope import angles
from weft.models.routed_depth import BIG, CHOICES, SKIP, on_paths
from weft.models.transformer import Transformer
from weft.pages import render, write

T = torch.Tensor

#: Up to this many layers all paths are tried; with more, the best ones of a beam of this width.
EXHAUSTIVE, BEAM = 5, 12
#: Share of the windows that routers learn from; the others are judged on.
LEARNED = 0.6
#: Hidden units of a router, and its training.
HIDDEN, STEPS, RATE = 64, 300, 3e-3


@dataclass(frozen=True)
class BudgetResult:
    """Losses of a model when different methods choose the modules of each token, all within one budget of computation.
    A path says for every layer whether a token skips the layer or takes its small or its big module. Losses are means
    per token in nats.

    Attributes:
        ``budget``: largest cost of a path, as a share of the cost of all big modules.
        ``oracle``: loss if each token took its best path while the other tokens kept one common path.
        ``mixed_oracle``: loss when all tokens take these best paths together.
        ``router``,
        ``random``,
        ``fixed``: losses with a trained router, with random paths that use the budget, and with the best common path
            for all tokens.
        ``costs``: mean cost of a token's path, by the name of the method.
        ``choices``: for each layer, the shares of the tokens that skip it, take the small module and take the big
            module, on the oracle's paths.
    """

    budget: float
    oracle: float
    mixed_oracle: float
    router: float
    random: float
    fixed: float
    costs: dict[str, float]
    choices: list[list[float]]


@dataclass(frozen=True)
class PathStudy:
    """Result of :func:`study_paths`.

    Attributes:
        ``tokens``: number of tokens that were judged.
        ``paths``: number of paths that were tried.
        ``exhaustive``: whether these were all possible paths.
        ``whole``: loss with all big modules.
        ``without``: for each layer, the loss if all tokens skip it and take the big modules of all others.
        ``budgets``: one result for each budget.
    """

    tokens: int
    paths: int
    exhaustive: bool
    whole: float
    without: list[float]
    budgets: list[BudgetResult]

    def record(self) -> dict[str, Any]:
        """Return all results of the study as values that JSON can write."""
        return asdict(self)


@dataclass(frozen=True)
class Windows:
    """Pieces of a text, all of the same length. ``tokens``, ``labels``: token ids of the pieces and the id after each
    of these tokens, ``[pieces, seq]`` each.
    """

    tokens: T
    labels: T


def text_windows(ids: Sequence[int], seq: int) -> Windows:
    """Return the text with the token ids ``ids``, cut into pieces of ``seq`` tokens. Raises :class:`UsageError` for
    fewer than five pieces.
    """
    pieces = (len(ids) - 1) // seq
    if pieces < 5:
        raise UsageError(
            f"the text has {len(ids):,} tokens, and a study needs {5 * seq + 1:,}; give a longer one, or lower --window"
        )
    cut = torch.tensor(ids[: pieces * seq + 1])
    return Windows(cut[:-1].view(pieces, seq), cut[1:].view(pieces, seq))


@torch.no_grad()
def token_losses(model: Transformer, text: Windows, paths: T) -> T:
    """Return the loss of each token of ``text`` under ``model`` in nats, ``[pieces, seq]``. ``paths``: for each layer
    and token, the module that the token takes, ``[layers, pieces, seq]``; the last two sizes may be 1, for all tokens
    alike.
    """
    pieces, seq = text.tokens.shape
    positions = torch.arange(seq).expand(pieces, seq)
    ends = torch.arange(pieces + 1, dtype=torch.int32) * seq
    with on_paths(paths):
        logits = model(text.tokens, positions, ends)
    return F.cross_entropy(
        logits.flatten(0, 1).float(), text.labels.flatten(), reduction="none"
    ).view(pieces, seq)


def path_costs(paths: T, small: float) -> T:
    """Return the cost of each of ``paths`` ``[layers, ...]``, as a share of the cost of all big modules.

    ``small``: cost of a small module, where that of a big one is 1.
    """
    return torch.tensor([0.0, small, 1.0])[paths].mean(0)


def candidate_paths(
    model: Transformer, text: Windows, small: float, budgets: Sequence[float]
) -> T:
    """Return the paths ``[layers, paths]`` among which the study chooses a best one for each token of ``text``. A path
    names for each layer the module that a token takes. In a shallow model these are all paths. In a deep one they
    come from a beam search. It starts from all big modules and replaces one module after the other by a cheaper one.
    It ends when a path costs no more than the smallest of ``budgets``. The result then has every path that was in
    the beam. ``small``: cost of a small module, where that of a big one is 1.
    """
    layers = model.shape.layers
    if layers <= EXHAUSTIVE:
        return torch.tensor([*product(range(len(CHOICES)), repeat=layers)]).t()
    beam, known = [(BIG,) * layers], {(BIG,) * layers}
    few = Windows(text.tokens[:4], text.labels[:4])
    while beam and min(float(path_costs(torch.tensor(p), small)) for p in known) > min(
        budgets
    ):
        cheaper = {
            (*path[:i], path[i] - 1, *path[i + 1 :])
            for path in beam
            for i in range(layers)
            if path[i] > SKIP
        }
        losses = {
            path: float(token_losses(model, few, torch.tensor(path)[:, None, None]).mean())
            for path in cheaper
        }  # fmt: skip
        beam = sorted(losses, key=losses.__getitem__)[:BEAM]
        known.update(beam)
    return torch.tensor(sorted(known)).t()


def study_paths(
    model: Transformer, ids: Sequence[int], budgets: Sequence[float], seq: int = 128, seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> PathStudy:  # fmt: skip
    """Compare ways to choose for each token, in each layer, the big feed-forward, the small one or none, within budgets
    of computation. Return the losses that each way reaches.

    Raises :class:`UsageError` for a model without small feed-forwards, and for a text or budget that is too small.

    Args:
        ``model``: the model, trained with ``model.small_ffn``.
        ``ids``: token ids of a text that the model has not learned.
        ``budgets``: bounds on the cost of a token's choices in all layers, as shares of the cost of all big
            feed-forwards.
        ``seq``: number of tokens of each piece into which the text is cut.
        ``seed``: seed of random choices and of the routers' initial weights.
        ``say``: called with a line about the progress.
    """
    shape = model.shape
    if not shape.small_ffn:
        raise UsageError(
            "the model has no small feed-forwards to choose; train one with model.small_ffn, as recipes/duo.toml does"
        )
    if not budgets or min(budgets) < 0 or max(budgets) > 1:
        raise UsageError("budgets are shares of the big modules' cost, from 0 to 1")
    assert shape.ffn
    text, small = text_windows(ids, seq), shape.small_ffn / shape.ffn
    cut = round(LEARNED * len(text.tokens))
    learned = Windows(text.tokens[:cut], text.labels[:cut])
    judged = Windows(text.tokens[cut:], text.labels[cut:])
    paths = candidate_paths(model, learned, small, budgets)
    costs = path_costs(paths, small)
    say(f"{paths.shape[1]} paths on {text.tokens.numel():,} tokens")
    each = [
        (token_losses(model, learned, path), token_losses(model, judged, path))
        for path in paths.t()[:, :, None, None]
    ]
    tables = [
        torch.stack(part) for part in zip(*each, strict=True)
    ]  # [paths, pieces, seq]
    hidden = [first_hidden(model, part) for part in (learned, judged)]
    big = torch.full((shape.layers, 1, 1), BIG)
    without = []
    for layer in range(shape.layers):
        path = big.clone()
        path[layer] = SKIP
        without.append(float(token_losses(model, judged, path).mean()))
    results = []
    for budget in budgets:
        allowed = (costs <= budget + 1e-9).nonzero().flatten()
        if not len(allowed):
            raise UsageError(f"no path costs {budget} or less; give a larger budget")
        say(f"budget {budget}: {len(allowed)} paths")
        results.append(
            _at_budget(model, judged, paths, costs, budget, allowed, tables, hidden, seed)
        )  # fmt: skip
    whole = float(token_losses(model, judged, big).mean())
    count, total = paths.shape[1], len(CHOICES) ** shape.layers
    return PathStudy(judged.tokens.numel(), count, count == total, whole, without, results)  # fmt: skip


def _at_budget(
    model: Transformer, judged: Windows, paths: T, costs: T, budget: float, allowed: T, tables: Sequence[T],
    hidden: Sequence[T], seed: int,
) -> BudgetResult:  # fmt: skip
    """Compare the ways to choose among the paths ``allowed``. The other arguments are those of :func:`study_paths`."""
    learned_losses, losses = (table[allowed] for table in tables)
    of_oracle = losses.argmin(0)  # [pieces, seq]
    gen = torch.Generator().manual_seed(seed)
    dear = (costs[allowed] > costs[allowed].max() - 1 / model.shape.layers).nonzero()
    drawn = torch.randint(len(dear), of_oracle.shape, generator=gen)
    router = train_router(hidden[0], learned_losses.flatten(1).t(), seed)
    with torch.no_grad():
        of_router = router(hidden[1]).argmax(-1).view(of_oracle.shape)
    best = int(learned_losses.flatten(1).mean(1).argmin())
    chosen = {
        "oracle": of_oracle,
        "router": of_router,
        "random": dear.flatten()[drawn],
        "fixed": torch.full_like(of_oracle, best),
    }
    results, spent = {}, {}
    for name, index in chosen.items():
        taken = paths[:, allowed[index]]  # [layers, pieces, seq]
        results[name] = float(token_losses(model, judged, taken).mean())
        spent[name] = float(costs[allowed[index]].mean())
    taken = paths[:, allowed[of_oracle]].flatten(1)
    shares = [[float((row == c).float().mean()) for c in range(3)] for row in taken]
    seen = float(losses.amin(0).mean())
    return BudgetResult(
        budget, seen, results["oracle"], results["router"], results["random"], results["fixed"], spent, shares
    )  # fmt: skip


@torch.no_grad()
def first_hidden(model: Transformer, text: Windows) -> T:
    """Return the input of the first layer's feed-forward module for each token, ``[tokens, embed]``. It does not depend
    on the paths of the tokens.
    """
    kept: list[T] = []
    pieces, seq = text.tokens.shape
    block: Any = model.blocks["0"]
    hook = block.ffn_norm.register_forward_hook(lambda module, given, y: kept.append(y))
    x = model.embedding(text.tokens)
    rope = angles(torch.arange(seq).expand(pieces, seq), model.freq, x.dtype)
    model.run_block(0, x, rope, torch.arange(pieces + 1, dtype=torch.int32) * seq)
    hook.remove()
    return kept[0].flatten(0, 1).float()


def train_router(hidden: T, losses: T, seed: int) -> nn.Module:
    """Train a router that chooses a path for each token, and return it: a network from ``embed`` to scores of paths.

    The objective is the expected loss of a token whose path is drawn with the router's probabilities. ``hidden``: what
    the router reads, ``[tokens, embed]``; ``losses``: the loss of each token on each path, ``[tokens, paths]``.
    ``seed``: seed of the initial weights.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        router = nn.Sequential(
            nn.Linear(hidden.shape[1], HIDDEN), nn.GELU(), nn.Linear(HIDDEN, losses.shape[1])
        )  # fmt: skip
        regret = losses - losses.mean(1, keepdim=True)
        rule = torch.optim.AdamW(router.parameters(), RATE, weight_decay=0.1)
        for _ in range(STEPS):
            at = torch.randint(len(hidden), (min(1024, len(hidden)),))
            chances = router(hidden[at]).softmax(-1)
            loss = (chances * regret[at]).sum(1).mean()
            rule.zero_grad()
            loss.backward()
            rule.step()
    return router.eval()


def write_study(study: PathStudy, name: str, out: Path, program: str) -> Path:
    """Write a page with the plots of ``study`` to the file ``out``, and return its path. ``name``: name of the model.
    ``program``: name of the file of the Plotly library, which lies beside the page.
    """
    rows = study.budgets
    at = [row.budget for row in rows]
    lines = {
        "oracle": [row.oracle for row in rows],
        "oracle, all together": [row.mixed_oracle for row in rows],
        "router": [row.router for row in rows],
        "best path for all": [row.fixed for row in rows],
        "random": [row.random for row in rows],
        "all big modules": [study.whole] * len(rows),
    }
    losses = [
        {"x": at, "y": y, "name": key, "mode": "lines+markers"}
        for key, y in lines.items()
    ]
    layers = [f"layer {i}" for i in range(len(study.without))]
    charts: list[dict[str, Any]] = [
        {"title": "Loss by budget", "data": losses, "layout": {
            "xaxis": {"title": {"text": "cost, share of all big modules"}},
        }},
        {"title": "Loss added by skipping one layer", "data": [
            {"type": "bar", "x": layers, "y": [loss - study.whole for loss in study.without]},
        ], "layout": {}},
    ]  # fmt: skip
    for row in rows:
        bars = [
            {"type": "bar", "x": layers, "y": [each[i] for each in row.choices], "name": choice}
            for i, choice in enumerate(CHOICES)
        ]  # fmt: skip
        charts.append(
            {"title": f"What the oracle takes at {row.budget:g}", "data": bars, "layout": {"barmode": "stack"}}
        )  # fmt: skip
    page = render(
        "charts_page.html", title=f"Paths through {name}", kind="study", plotly=program, charts=charts,
        subtitle=f"{study.paths} paths, {study.tokens:,} tokens",
    )  # fmt: skip
    return write(out, page, "--out")
