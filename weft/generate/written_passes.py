"""What the passes that wrote texts have computed of each token, for a pass that learns from the texts.

All that a model computes of a token follows from the weights, the token and those before it. Where a text is learned
from with the weights that wrote it, the products of its tokens with the weights are therefore known: the forward pass
before backward needs no more than to look them up. They are a third of the products of learning.

A token is found by all tokens before it: tokens of all texts are one tree, whose branches are texts that begin alike. A
prompt that was computed once for several answers, or found in the cache, is thus found for all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from weft.generate.request import Request
    from weft.generate.scheduler import ScheduledStep

T = torch.Tensor

#: The place before the first token of every text.
ROOT = 0

#: Rows of no token that a pass may have at most.
SPARE = 64

#: Bytes of logits that are kept at most: those of large vocabularies are larger than all that a pass that learns keeps.
LOGIT_BYTES = 512 << 20

#: Share of memory that kept logits may leave unused, as rows of no text.
UNUSED = 0.1


class TokenTree:
    """Tokens of texts, each with all tokens before it, as numbered nodes of a tree. :data:`ROOT` is before all."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[int, int], int] = {}

    def add(self, node: int, ids: Sequence[int]) -> list[int]:
        """Return the nodes of the tokens ``ids`` after ``node``. Those that are not in the tree yet are added."""
        path = list[int]()
        for token in ids:
            node = self.nodes.setdefault((node, token), len(self.nodes) + 1)
            path.append(node)
        return path

    def look_up(self, node: int, ids: Sequence[int]) -> list[int] | None:
        """Return the nodes of the tokens ``ids`` after ``node``; None if one is not in the tree."""
        path = list[int]()
        for token in ids:
            after = self.nodes.get((node, token))
            if after is None:
                return None
            path.append(node := after)
        return path


class WrittenPasses:
    """Results of the passes that write texts with one version of the weights
    (:class:`weft.models.row_layers.ProductKeeper`).

    ``most``: largest number of tokens whose results are kept; if there are more, none are.

    Attributes:
        ``lost``: why nothing is kept any more; "": all results are here.
        ``rows``: the row of each node's token among all that are kept.
        ``logit_rows``: the row of logits of each node's token, where it has any.

    Logits are kept up to :data:`LOGIT_BYTES`. If there are more, none are, and products still are.
    """

    def __init__(self, most: int) -> None:
        self.most, self.lost = most, ""
        self.tree = TokenTree()
        self.rows: dict[int, int] = {}
        self.logit_rows: dict[int, int] = {}
        self.products: dict[tuple[str, tuple[str, ...]], T] = {}
        self.logits: list[T] = []
        self._logit_bytes = 0
        # what passes were to compute, and have computed
        self._tokens = self._logits = self._with_logits = 0
        self._counts = defaultdict[tuple[str, tuple[str, ...]], int](int)
        self._pass = range(0)  # the rows of the present one
        # the tokens of each text so far, and the node of the last one
        self._ends: dict[Request, tuple[int, int]] = {}

    def begin(self, step: ScheduledStep, rows: Sequence[int]) -> None:
        """Note which tokens the pass of ``step`` computes. ``rows``: of how many last tokens of each text it returns
        logits.
        """
        if self.lost:
            return
        first = self._tokens
        for (request, tokens), wanted in zip(step.work.items(), rows, strict=False):
            beside = request.branches or request.context or request.adapter
            if beside or request.offset or len(rows) != len(step.work):
                self.drop("a text has more than its own tokens")
                return
            nodes = self._nodes(request, request.computed, tokens)
            self.rows |= zip(nodes, range(self._tokens, self._tokens + tokens), strict=True)  # fmt: skip
            with_logits = nodes[len(nodes) - wanted :]
            self.logit_rows |= zip(with_logits, range(self._logits, self._logits + wanted), strict=True)  # fmt: skip
            self._tokens, self._logits = self._tokens + tokens, self._logits + wanted
        self._pass = range(first, self._tokens)
        if self._tokens > self.most:
            self.drop("texts have more tokens than a pass that learns")

    def _nodes(self, request: Request, past: int, tokens: int) -> list[int]:
        """Return the nodes of the ``tokens`` tokens of ``request`` after its first ``past``."""
        known, node = self._ends.get(request, (0, ROOT))
        if known != past:
            before = self.tree.add(ROOT, request.ids[:past])
            node = before[-1] if before else ROOT
        nodes = self.tree.add(node, request.ids[past : past + tokens])
        self._ends[request] = past + tokens, nodes[-1]
        return nodes

    def keep(self, path: str, names: tuple[str, ...], y: T) -> None:
        """Keep what the product with the weights ``names`` of the module ``path`` has made of the pass's tokens:
        ``[tokens, out]``.
        """
        if not self.lost and len(y) == len(self._pass):
            self.room(path, names, len(y), y.shape[1], y.dtype).copy_(y)

    def room(
        self,
        path: str,
        names: tuple[str, ...],
        rows: int,
        out: int,
        dtype: torch.dtype = torch.float32,
    ) -> T:
        """Return the memory ``[rows, out]`` to which the caller writes what :meth:`keep` would keep. It may have more
        rows than the pass has tokens, at most :data:`SPARE`; the next pass overwrites these.
        """
        if self.lost:
            return torch.empty(rows, out, dtype=dtype)
        key = path, names
        if key not in self.products:
            self.products[key] = torch.empty(self.most + SPARE, out, dtype=dtype)
        self._counts[key] += len(self._pass)
        return self.products[key].narrow(0, self._pass.start, rows)

    def end(self, logits: T) -> None:
        """Keep the ``logits`` ``[rows, vocab]`` of a pass, which has ended."""
        if self.lost:
            return
        self._keep_logits(logits)
        self._with_logits += len(logits)
        alike = {*self._counts.values()} == {self._tokens}
        if not alike or self._with_logits != self._logits:
            self.drop("a pass has computed other tokens than it was to")

    def _keep_logits(self, logits: T) -> None:
        """Keep the ``logits`` ``[rows, vocab]`` of a pass, or none of any pass if they are too many."""
        self._logit_bytes += logits.nbytes
        if self._logit_bytes > LOGIT_BYTES:
            self.logits.clear()
            return
        # a kernel's result has more rows than texts: a view would hold all of them
        held = logits.untyped_storage().nbytes()
        few = logits.nbytes < (1 - UNUSED) * held
        self.logits.append(logits.clone() if few else logits)

    def has_logits(self) -> bool:
        """Return whether the logits of all passes are here."""
        return bool(self.logits) and self._logit_bytes <= LOGIT_BYTES

    def drop(self, why: str) -> None:
        """Forget all results, and keep none of later passes. ``why``: the reason."""
        self.lost = why
        self.products.clear()
        self.logits.clear()
        self._ends.clear()
        self.tree = TokenTree()

    def take(self, path: str, names: tuple[str, ...], at: T) -> T:
        """Return what the product with the weights ``names`` of the module ``path`` has made of the tokens whose rows
        are ``at``, int64 ``[tokens]``: ``[tokens, out]``. It is forgotten here.
        """
        return self.products.pop((path, names)).index_select(0, at)

    def take_logits(self, at: T) -> T:
        """Return the rows ``at``, int64 ``[rows]``, of all logits: ``[rows, vocab]``. They are forgotten here."""
        parts, first = self.logits[::-1], 0
        self.logits = []
        chosen = torch.empty(len(at), parts[0].shape[1], dtype=parts[0].dtype)
        while parts:  # each is freed as soon as it is copied
            part = parts.pop()
            here = ((at >= first) & (at < first + len(part))).nonzero()[:, 0]
            chosen.index_copy_(0, here, part.index_select(0, at[here] - first))
            first += len(part)
        return chosen
