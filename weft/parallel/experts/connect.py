"""Give a model's mixtures of experts their dispatcher."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch

from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.experts import Dispatcher, Mixture
from weft.models.router import Choice
from weft.models.transformer import Transformer
from weft.parallel.experts.dispatch import Placing
from weft.parallel.experts.expert_ranks import ExpertRanks
from weft.parallel.experts.hashed import Hashed
from weft.registry import find

T = torch.Tensor

#: Bytes of rows that a message has at least, and pieces at most, where their number follows from bytes.
LEAST, MOST = 2**20, 8


def connect_experts(model: Transformer, mesh: Mesh) -> None:
    """Give each mixture of experts in ``model`` the dispatcher that brings tokens to other ranks' experts (``ep``)."""
    for module in model.modules():
        if isinstance(module, Mixture):
            assert model.loads is not None
            make = find("dispatch", mesh.layout.dispatch).implementation().make
            module.copies = connect_mixture(module, make, model.loads.sent).copies
            module.pieces = partial(count_pieces, mesh.layout)


def count_pieces(layout: Layout, tokens: T, choice: Choice) -> int:
    """Return into how many chunks the tokens of a pass are cut before dispatch, the same number on all ranks.

    If ``layout.pieces`` is not 0, the result is that number. If it is 0, the result is the largest number up to 8 with
    which a message has at least 1 MiB. In that case tokens are not cut (1) where no gradients are computed, or where
    ranks may have different numbers of tokens. ``tokens``: ``[tokens, embed]``; ``choice``: the experts to which the
    tokens are routed.
    """
    # documents by length, a prompt: unequally many
    if layout.pieces or layout.balance or not torch.is_grad_enabled():
        return layout.pieces or 1
    message = choice.ids.numel() * tokens.shape[1] * tokens.element_size() // layout.ep
    return max(1, min(MOST, message // LEAST))


def connect_mixture(
    mixture: Mixture, way: Callable[[ExpertRanks], Dispatcher], sent: Counter[str]
) -> ExpertRanks:
    """Give the layer ``mixture`` the dispatcher that ``way`` makes, and return the ranks that hold the layer's experts.

    ``way``: function from the ranks that hold the experts to a dispatcher among them; ``sent``: counter to which the
    bytes that this rank sends are added, by kind of data.
    """
    ranks = ExpertRanks(mixture.mesh, mixture.experts.logical["gate"].dims, sent)
    placing = Placing(ranks, way(ranks))
    mixture.dispatcher = Hashed(ranks, placing) if ranks.mesh.layout.lsh else placing
    return ranks
