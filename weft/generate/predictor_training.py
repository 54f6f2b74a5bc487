"""Training of the predictors by which neurons are read before it is known that they are active (2312.11514).

A model reads texts, and each layer's predictor sees the inputs of its feed-forward and which gates are positive. It
begins as the matrix of low rank that is closest to the gates on these inputs, and learns by logistic regression, in
which active and other neurons weigh the same. Its bias is then set so that it finds a given share of the active neurons
of texts that it has not learned from.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from weft.errors import UsageError
from weft.memory.neuron_predictor import LayerPredictor, gates_of
from weft.memory.resting_neurons import feed_forward_inputs, has_plain_relu
from weft.models.transformer import Transformer

T = torch.Tensor

#: Tokens that are read together, and tokens of a step of learning.
TOKENS, STEP = 512, 256

#: Learning rate of the predictors' matrices.
RATE = 1e-3


class PredictorScore(NamedTuple):
    """How well a layer's predictor of active neurons does on held-out text.

    Attributes:
        ``layer``: number of the layer.
        ``active``: share of the neurons that are active.
        ``recall``: share of the active neurons that the predictor finds.
        ``predicted``: share of the neurons that the predictor calls active.
    """

    layer: int
    active: float
    recall: float
    predicted: float


class TrainedPredictors(NamedTuple):
    """Predictors of active neurons, and how well they do on held-out text. ``layers``: the predictors by number of the
    layer. ``scores``: one score for each layer.
    """

    layers: dict[int, LayerPredictor]
    scores: list[PredictorScore]


def train_predictors(
    model: Transformer, ids: Sequence[int], rank: int, recall: float, passes: int,
    say: Callable[[str], None] = lambda line: None,
) -> TrainedPredictors:  # fmt: skip
    """Train, for each layer of ``model``, a predictor of the neurons that are active in the layer's feed-forward for a
    token. Return the predictors with their scores. ``ids``: tokens of a text, an eighth of which is held back to judge
    the predictors. ``rank``: rank of the predictors. ``recall``: share of the active neurons that they are to find.
    ``passes``: how often all tokens are learned from. ``say``: called with a line about each layer. Raises
    :class:`UsageError` for a model without ReLU, for a ``rank`` above the model's width, and for fewer than four
    windows of :data:`TOKENS` tokens.
    """
    if not has_plain_relu(model.shape):
        raise UsageError(
            "predictors are for dense models with activation relu; train one with model.activation = 'relu'"
        )
    if rank > model.shape.embed:
        raise UsageError(f"--rank {rank} is more than the model's width of {model.shape.embed}; lower it")  # fmt: skip
    windows = [ids[i : i + TOKENS] for i in range(0, len(ids), TOKENS)]
    held = max(1, len(windows) // 8)
    if len(windows) < 4:
        raise UsageError(
            f"--texts has {len(ids):,} tokens, and predictors need {3 * TOKENS + 1:,}; give more"
        )
    inputs = _inputs(model, windows)
    of_model = dict(model.named_parameters())
    gates = dict(gates_of(model, lambda name, logical, box: of_model[name].detach()))
    layers, scores = dict[int, LayerPredictor](), list[PredictorScore]()
    count = sum(map(len, windows[:-held]))
    for layer, rows in inputs.items():
        seen, unseen = rows[:count].float(), rows[count:].float()
        predictor = _learned(seen, gates[layer].float(), rank, passes)
        layers[layer], score = _calibrated(predictor, layer, unseen, gates[layer].float(), recall)  # fmt: skip
        scores.append(score)
        say(
            f"layer {layer}: {score.active:.1%} of the neurons are active, {score.recall:.1%} of them are found, and "
            f"{score.predicted:.1%} are predicted"
        )
    return TrainedPredictors(layers, scores)


@torch.inference_mode()
def _inputs(model: Transformer, windows: Sequence[Sequence[int]]) -> dict[int, T]:
    """Return the inputs of all feed-forwards of texts: by layer, bfloat16 ``[tokens, embed]``."""
    kept: dict[int, list[T]] = {int(number): [] for number in model.blocks}
    hooks = feed_forward_inputs(model, lambda i, x: kept[i].append(x[0].cpu().bfloat16()))  # fmt: skip
    for window in windows:
        tokens = torch.tensor([window], device=model.mesh.device)
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        ends = torch.tensor([0, tokens.shape[1]], dtype=torch.int32)
        model(tokens, places, ends, only=slice(0))
    for hook in hooks:
        hook.remove()
    return {layer: torch.cat(rows) for layer, rows in kept.items()}


def _learned(x: T, gate: T, rank: int, passes: int) -> LayerPredictor:
    """Return a predictor of the signs of ``x gate'`` that has learned from ``x`` ``[tokens, embed]``."""
    square = x.t() @ x / len(x)
    square.diagonal().add_(1e-4 * square.diagonal().mean())
    root = torch.linalg.cholesky(
        square
    )  # the gates that are closest on inputs, not in their numbers
    whitened = gate @ root
    v = torch.linalg.eigh(whitened.t() @ whitened).eigenvectors[
        :, -rank:
    ]  # [embed, rank]
    b = whitened @ v
    a = torch.linalg.solve_triangular(root, v.t(), upper=False, left=False)
    learned = [each.clone().requires_grad_() for each in (a, b, torch.zeros(len(gate)))]
    optimizer = torch.optim.Adam(learned, RATE)
    for batch in _batches(x, passes):
        active = batch @ gate.t() > 0
        scores = torch.addmm(learned[2], batch @ learned[0].t(), learned[1].t())
        share = active.float().mean().clamp(1e-4, 1 - 1e-4)
        weights = torch.where(active, 0.5 / share, 0.5 / (1 - share))
        loss = F.binary_cross_entropy_with_logits(scores, active.float(), weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return LayerPredictor(*(each.detach() for each in learned))


def _batches(x: T, passes: int) -> Iterator[T]:
    """Yield the rows of ``x`` in another order in each pass."""
    drawn = torch.Generator().manual_seed(0)
    for _ in range(passes):
        order = torch.randperm(len(x), generator=drawn)
        yield from (x[some] for some in order.split(STEP))


def _calibrated(
    predictor: LayerPredictor, layer: int, x: T, gate: T, recall: float
) -> tuple[LayerPredictor, PredictorScore]:
    """Return ``predictor`` with a bias that lets it find the share ``recall`` of the active neurons of one half of
    ``x``, and how it does on the other half.
    """
    some, x = x.tensor_split(2)
    scores = torch.addmm(predictor.bias, some @ predictor.a.t(), predictor.b.t())
    of_active = scores[some @ gate.t() > 0].sort().values
    missed = min(int((1 - recall) * len(of_active)), len(of_active) - 1)
    least = of_active[missed] if len(of_active) else 0.0
    moved = predictor._replace(bias=predictor.bias - least + 1e-6)
    active, predicted = x @ gate.t() > 0, moved.active(x)
    score = PredictorScore(
        layer,
        active.float().mean().item(),
        (predicted & active).sum().item() / max(1, active.sum().item()),
        predicted.float().mean().item(),
    )
    return moved, score
