"""Models of plugins: a plain PyTorch module that maps tokens to logits, whole on every rank.

A plugin's ``model(vocab, **settings)`` returns a ``torch.nn.Module`` whose ``forward(tokens, positions, cu_seqlens)``
gives logits ``[batch, seq, vocab]``. ``tokens`` and ``positions`` are int64 ``[batch, seq]``: rows hold several
documents, in which positions count from 0, and ``cu_seqlens`` are the edges of all documents in the ``batch * seq``
tokens one after the other. No token may look at another document's tokens, nor at later ones. Parameters begin as the
module makes them under ``torch.manual_seed(train.seed)``.

Layouts with ``dp`` and ``shard`` train such a model: they cut rows of parameters and need to know nothing else. ``tp``,
``cp`` and ``pp`` would have to know its parts.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.data.batch import Batch
from weft.errors import WeftError
from weft.layout.dims import Box, Dim, Logical, slices
from weft.layout.mesh import Mesh
from weft.models.hooks import NO_HOOKS, Hooks
from weft.models.module import Module
from weft.models.plugin_loss import TokenLoss
from weft.models.transformer import Transformer
from weft.models.values import Values
from weft.plugins import blaming, build_plugin_model
from weft.recipe import ModelShape
from weft.registry import find

T = torch.Tensor


class PluginModel(Transformer):
    """A model with a plugin's module in place of embedding, blocks and output layer, used like a :class:`Transformer`.
    ``shape``: shape of the model; ``mesh``: ranks that share the model; ``loss_chunk``: number of tokens whose loss is
    computed at a time; ``hooks``: functions that passes call.
    """

    def __init__(
        self,
        shape: ModelShape,
        mesh: Mesh,
        loss_chunk: int = 1024,
        hooks: Hooks = NO_HOOKS,
    ) -> None:
        Module.__init__(self, mesh, {})
        self.shape, self.loss_chunk = shape, loss_chunk
        self.pipeline, self.loads = None, None
        criterion = hooks.criterion or cross_entropy(shape.vocab)
        self.hooks = replace(hooks, criterion=criterion)
        self.freq = torch.zeros(0)
        self.blocks = nn.ModuleDict()
        with torch.random.fork_rng(devices=[]):
            self.net = build_plugin_model(shape, shape.vocab)
        for name, p in self.net.named_parameters():
            dims = [Dim(f"d{i}", size) for i, size in enumerate(p.shape)]
            self.logical[f"net.{name}"] = mesh.place.logical(dims, std=None)

    def forward(
        self, tokens: T, positions: T, cu_seqlens: T, learned: Batch | None = None, only: slice | T | None = None,
        seen: Any = None, hooks: Hooks | None = None, route: Sequence[int] | None = None,
    ) -> T:  # fmt: skip
        """Return the logits of the plugin's module, or the loss of the batch ``learned`` if it is given.

        The arguments are those of :meth:`Transformer.forward`.
        """
        who = find("model", self.shape.kind)
        logits: T = blaming(who, self.net)(tokens, positions, cu_seqlens)
        if logits.shape != (*tokens.shape, self.shape.vocab):
            wanted = [*tokens.shape, self.shape.vocab]
            raise WeftError(
                f"{who} returned {list(logits.shape)} where logits {wanted} are needed"
            )
        if learned is None:
            return logits if only is None else logits[:, only]
        counts = None if learned.weights is None else learned.weights.flatten()
        labels = learned.labels.flatten()
        criterion = (hooks or self.hooks).criterion
        assert criterion is not None
        loss: T = criterion(
            logits.flatten(0, 1), None, labels, 0, self.loss_chunk, self.mesh, counts
        )
        return loss


def cross_entropy(vocab: int) -> TokenLoss:
    """Return the cross entropy as a :class:`TokenLoss`, for a plugin's model with ``vocab`` tokens."""
    return TokenLoss(partial(nn.functional.cross_entropy, reduction="none"), vocab)


def plugin_values(shape: ModelShape, seed: int) -> Values:
    """Return a function that gives the initial values of any box of a parameter of a plugin's model of ``shape``. They
    are the values with which the plugin's module is built under PyTorch's seed ``seed``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = build_plugin_model(shape, shape.vocab)
    parameters = {f"net.{name}": p.detach() for name, p in net.named_parameters()}

    def values(name: str, logical: Logical, box: Box) -> T:
        return parameters[name][slices(box)]

    return values
