"""Experts of domains: models of different size that never exchange anything in training, one at evaluation.

Each model learns one domain alone, wherever it likes (branch-train-merge, Li et al. 2022; c-BTM, Gururangan et al.
2023), and may be as large as its domain is hard (HDEE, 2025). They share a tokenizer and nothing else. At evaluation
they are a mixture: after some tokens of a document, how much an expert counts is how likely it has made those, times
its prior (Bayes), so that no router is trained. :func:`mixture` is exact for all experts, or keeps the ``top`` ones.
Run ``python -m examples.domains``: code and prose, the harder one with the larger model.
"""

import json
import pydoc_data.topics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.checkpoint.model import open_model, tokenizer_of
from weft.data.tokenizer import Tokenizer
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.recipe import build_recipe
from weft.train.setup import prepare
from weft.train.training import train_job

T = torch.Tensor


@dataclass(frozen=True)
class Expert:
    """A model that has learned one domain, in ``tokens`` tokens, and the tokenizer that all share."""

    model: Transformer
    tokenizer: Tokenizer
    tokens: int

    @property
    def cost(self) -> float:
        """Flops that its training took, six for each parameter and token."""
        return 6.0 * sum(p.numel() for p in self.model.parameters()) * self.tokens

    @torch.no_grad()
    def scores(self, tokens: T) -> T:
        """Log-probability ``[length - 1]`` of each token of one document ``[length]`` but the first."""
        positions, ends = (
            torch.arange(len(tokens))[None],
            torch.tensor([0, len(tokens)], dtype=torch.int32),
        )
        # [length, vocab]
        logits = self.model(tokens[None], positions, ends)[0].double()
        return logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]


def train_expert(
    documents: Sequence[str],
    model: Mapping[str, int],
    steps: int,
    out: Path,
    seed: int = 0,
) -> Expert:
    """Train a model of these sizes on one domain's documents, on one device; run folder ``out``."""
    out.mkdir(parents=True)
    corpus = out / "domain.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    recipe = build_recipe({
        "model": dict(model),
        "data": {"sources": [{"kind": "jsonl", "path": str(corpus)}], "tokenizer": "bytes", "seq_len": 128,
                 "validation": 0.0, "cache": str(out / "cache")},
        "train": {"steps": steps, "batch": 8, "seed": seed},
        "optimizer": {"lr": 3e-3, "warmup": max(1, steps // 10)},
        "validation": {"every": 0},
        "observe": {"split_every": 0, "trackers": []},
    })  # fmt: skip
    outcome = train_job(prepare(recipe), Mesh.create(recipe.layout, "cpu"), out / "run")
    found, files, _ = open_model(out / "run", "cpu", print)
    return Expert(found.eval(), tokenizer_of(files, str(out)), outcome.progress.tokens)


def mixture(scores: T, prior: T, top: int = 0) -> T:
    """Log-probability ``[tokens]`` of each token by experts together, of their own ``scores [experts, tokens]``.

    ``prior [experts]``: of the domains, before anything of a document is seen. ``top``: only so many of the experts,
    those that are likeliest by what came before, have a say in a token.
    """
    before = scores.cumsum(1) - scores  # [experts, tokens]: of all tokens before each
    posterior = (prior.log()[:, None] + before).log_softmax(0)
    if 0 < top < len(scores):
        least = posterior.topk(top, dim=0).values[-1]
        posterior = posterior.masked_fill(posterior < least, -torch.inf).log_softmax(0)
    return (posterior + scores).logsumexp(0)


def losses(
    experts: Sequence[Expert], documents: Sequence[str], prior: T, top: int = 0
) -> tuple[list[float], float]:
    """Mean loss per token of each expert alone, and of all together."""
    alone, together, count = torch.zeros(len(experts), dtype=torch.float64), 0.0, 0
    for text in documents:
        tokens = torch.tensor(experts[0].tokenizer.encode(text))
        # [experts, tokens]
        scores = torch.stack([expert.scores(tokens) for expert in experts])
        alone -= scores.sum(1)
        together -= float(mixture(scores, prior, top).sum())
        count += len(tokens) - 1
    return (alone / count).tolist(), together / count


def domains(count: int = 120, length: int = 1200) -> dict[str, list[str]]:
    """Code and prose of this Python: its modules, and what ``help()`` knows of its words."""
    modules = sorted(Path(json.__file__).parents[1].glob("*.py"))
    code = "\n".join(path.read_text(errors="ignore") for path in modules[:60])
    prose = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    return {
        name: [
            text[i : i + length]
            for i in range(0, len(text), max(length, len(text) // count))
        ][:count]
        for name, text in {"code": code, "prose": prose}.items()
    }


def main(steps: int = 300) -> None:
    told = domains()
    learned, held = (
        {k: v[:-20] for k, v in told.items()},
        {k: v[-20:] for k, v in told.items()},
    )
    large = {"layers": 4, "embed": 96, "heads": 4, "ffn": 256}
    small = {"layers": 2, "embed": 64, "heads": 4, "ffn": 160}
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "code": (learned["code"], large, steps),
            "prose": (learned["prose"], small, steps),
        }
        experts = [
            train_expert(*run, Path(folder) / name) for name, run in runs.items()
        ]
        whole = train_expert(
            [*learned["code"], *learned["prose"]], large, steps, Path(folder) / "whole"
        )
    prior = torch.full((2,), 0.5, dtype=torch.float64)
    cost = sum(expert.cost for expert in experts)
    print(
        f"training: {cost:.3g} flops of both experts, {whole.cost:.3g} of one model for both domains"
    )
    for name, documents in [*held.items(), ("both", [*held["code"], *held["prose"]])]:
        alone, together = losses(experts, documents, prior)
        first = losses(experts, documents, prior, top=1)[1]
        one = losses([whole], documents, torch.ones(1, dtype=torch.float64))[1]
        print(f"{name:5} code's expert {alone[0]:.3f}  prose's {alone[1]:.3f}  together {together:.3f}  the likeliest "
              f"{first:.3f}  one model for both {one:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
