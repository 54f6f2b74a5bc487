"""An engine whose texts are written by several experts together, each a whole model with a cache of its own.

The first expert's engine plans, samples and answers as any other. Before it samples, every other expert computes the
same texts in an engine of its own, and the router joins what all of them say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weft.errors import UsageError, WeftError
from weft.generate.engine import Engine, LaunchedPass
from weft.generate.request import Generation, Request, WantedRows
from weft.generate.scheduler import ScheduledStep
from weft.models.numbers import wide
from weft.train.expert_join import joined_log_probabilities

if TYPE_CHECKING:
    from weft.models.transformer import Transformer
    from weft.train.expert_set import OpenedExperts

T = torch.Tensor

#: Steps without progress after which an expert's engine counts as stuck.
STUCK = 10_000


@dataclass
class JoinedText:
    """State of a text that several experts write together.

    Attributes:
        ``followers``: the same text in the engines of all experts but the first.
        ``evidence``: log-probability that each expert gives to the text's first ``counted`` tokens, ``[experts]``.
        ``counted``: number of these tokens.
        ``last``: each expert's log-probabilities of the next token, ``[experts, vocab]``; None before the first.
    """

    followers: list[Request]
    evidence: T
    counted: int
    last: T | None = None


class ExpertEngine(Engine):
    """An engine that mixes the predictions of several models (experts) to draw each token. It runs the first of
    ``experts`` itself, and has an engine of its own for each other one.

    The other arguments are as for :class:`weft.generate.engine.Engine`.
    """

    def __init__(
        self,
        experts: OpenedExperts,
        model: Transformer,
        tokens: int | None = None,
        *more: Any,
        **settings: Any,
    ) -> None:
        super().__init__(model, tokens, *more, **settings)
        budget, limit = self.scheduler.budget, self.scheduler.limit
        self.models, self.router = experts.models, experts.router
        self.others = [
            Engine(each, tokens, budget, limit) for each in experts.models[1:]
        ]
        self.texts: dict[Request, JoinedText] = {}

    def submit(self, *arguments: Any, **settings: Any) -> list[Generation]:
        if settings.get("scored") or (len(arguments) > 10 and arguments[10]):
            raise UsageError(
                "log-probabilities of a prompt are those of one model, and experts answer together; weft eval gives "
                "those of all"
            )
        return super().submit(*arguments, **settings)

    def fit(self, memory: int) -> int:
        parts = [memory // len(self.models)] * len(self.models)
        tokens = super().fit(parts[0])
        # the engines of the others measure with a text of their own, and would wait for this one's
        self._drop_ended()
        for engine, part in zip(self.others, parts[1:], strict=True):
            tokens = min(tokens, engine.fit(part))
        for engine in (self, *self.others):
            size = engine.reader.size
            engine.scheduler.pool.blocks = max(1, tokens // size)
        return tokens

    def launch(self, step: ScheduledStep) -> LaunchedPass:
        launched = super().launch(step)
        self._drop_ended()

        def logits() -> T:
            return self._joint(launched.rows, launched.logits())

        return launched._replace(logits=logits)

    def close(self) -> None:
        for engine in self.others:
            engine.close()
        super().close()

    def _drop_ended(self) -> None:
        """Forget the texts that this engine no longer writes."""
        for request in [*self.texts]:
            if request not in self.scheduler.running:
                self._drop(request)

    def _drop(self, request: Request) -> None:
        """Forget the text of ``request``, and free the cache blocks that other experts have for it."""
        text = self.texts.pop(request)
        for engine, follower in zip(self.others, text.followers, strict=True):
            engine.scheduler.remove(follower)

    def _joint(self, rows: Sequence[WantedRows], logits: T) -> T:
        """Replace the first expert's ``logits [rows, vocab]`` by those of all experts together."""
        places: list[tuple[Request, int]] = []
        at = 0
        for row in rows:
            at += row.prompt
            if row.drawn:
                places.append((row.request, at))
            at += row.drawn
        if not places:
            return logits
        said = self._said([request for request, _ in places])
        own = logits[[place for _, place in places]]
        logs = [x.to(wide(x.dtype)).log_softmax(-1) for x in (own, *said)]
        texts = [self.texts[request] for request, _ in places]
        for i, (text, (request, _)) in enumerate(zip(texts, places, strict=True)):
            self._count(text, request.ids)
            text.last = torch.stack([each[i] for each in logs])
        evidence = torch.stack([text.evidence for text in texts])
        weights = self.router.log_weights(evidence).to(logs[0].device)
        joint = logits.clone()
        values = joined_log_probabilities(logs, weights)
        joint[[place for _, place in places]] = values.to(joint.dtype)
        return joint

    def _said(self, requests: Sequence[Request]) -> list[T]:
        """Return the logits behind each text, ``[texts, vocab]``, of every expert but the first."""
        for request in requests:
            if request not in self.texts:
                self.texts[request] = self._followed(request)
        said = []
        for number, engine in enumerate(self.others):
            followers = [self.texts[request].followers[number] for request in requests]
            for follower, request in zip(followers, requests, strict=True):
                follower.ids[:], follower.logits = request.ids, None
                if not follower.runs:
                    engine.scheduler.add(follower)
            self._read(engine, followers)
            # [texts, vocab]
            logits = [x.logits for x in followers if x.logits is not None]
            said.append(torch.stack(logits).to(self.models[0].mesh.device))
        return said

    def _followed(self, request: Request) -> JoinedText:
        followers = [
            Request([*request.ids], request.most, tenant=request.tenant)
            for _ in self.others
        ]
        for engine, follower in zip(self.others, followers, strict=True):
            engine.scheduler.add(follower)
        evidence = [log_probability_of(model, request.ids) for model in self.models]
        return JoinedText(
            followers, torch.tensor(evidence, dtype=torch.float64), len(request.ids)
        )

    @staticmethod
    def _read(engine: Engine, followers: Sequence[Request]) -> None:
        """Take steps of ``engine`` until the logits behind all ``followers`` are computed."""
        still = 0
        while any(follower.logits is None for follower in followers):
            before = sum(follower.computed for follower in followers)
            engine.step()
            still = 0 if sum(f.computed for f in followers) > before else still + 1
            if still > STUCK:
                raise WeftError(
                    "an expert's cache has no room for the texts that the others write; give a larger --cache, or "
                    "fewer requests at a time"
                )

    def _count(self, text: JoinedText, ids: Sequence[int]) -> None:
        """Add to the evidence what each expert has made of the tokens that were written since."""
        if len(ids) == text.counted + 1 and text.last is not None:
            text.evidence += text.last[:, ids[-1]].cpu().double()
        elif len(ids) != text.counted:
            values = [log_probability_of(model, ids) for model in self.models]
            text.evidence = torch.tensor(values, dtype=torch.float64)
        text.counted = len(ids)


@torch.inference_mode()
def log_probability_of(model: Transformer, ids: Sequence[int]) -> float:
    """Return the sum of the log-probabilities that ``model`` gives to the tokens of the text ``ids``, without the
    first.
    """
    device = model.mesh.device
    tokens = torch.tensor(ids, device=device)
    positions = torch.arange(len(ids), device=device)
    documents = torch.tensor([0, len(ids)], dtype=torch.int32, device=device)
    logits = model(tokens[None], positions[None], documents)[0]  # [tokens, vocab]
    logs = logits[:-1].to(wide(logits.dtype)).log_softmax(-1)
    return float(logs.gather(-1, tokens[1:, None]).double().sum())
