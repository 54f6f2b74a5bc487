"""Averages of adapters by the product of their factors (motivated by CELLM's federated LoRA).

A low-rank adapter adds ``b a`` to a weight. The mean of several clients' ``b`` times the mean of their ``a`` is not the
mean of their products. Here a policy averages differences of products, and the server factorises the new product again,
by its largest singular values, into factors of the same rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weft.errors import UsageError

T = torch.Tensor
#: What ends the names of an adapter's factors ``a [rank, in]`` and ``b [out, rank]``, and of their product.
DOWN, UP, PRODUCT = ".a", ".b", ".product"


@dataclass(frozen=True)
class AdapterProducts:
    """Converts between an adapter's two factors and their product, so that products of clients can be averaged.

    ``stems``: for each adapter, the beginning that the names of its two factors have in common.
    """

    stems: tuple[str, ...]

    @classmethod
    def of(cls, names: Mapping[str, object]) -> AdapterProducts:
        """Return a converter for the adapters among the parameters with the names ``names``. Raises :class:`UsageError`
        if there are none.
        """
        stems = tuple(
            sorted(
                name.removesuffix(DOWN)
                for name in names
                if name.endswith(DOWN) and name.removesuffix(DOWN) + UP in names
            )
        )
        if not stems:
            raise UsageError(
                "federated.average = 'product' is about the factors of adapters, and none learn; add [adapter], leave "
                "both factors to learn, or leave average out"
            )
        return cls(stems)

    def product_difference(
        self, difference: Mapping[str, T], base: Mapping[str, T]
    ) -> dict[str, T]:
        """Return ``difference`` with the two factors of each adapter replaced by the difference of their product,
        ``[out, in]``.

        ``difference``: a client's differences of all parameters. ``base``: the parameters with which it began.
        """
        result = dict(difference)
        for stem in self.stems:
            a, b = base[stem + DOWN], base[stem + UP]
            moved_a, moved_b = result.pop(stem + DOWN), result.pop(stem + UP)
            # (b + db) (a + da) - b a
            result[stem + PRODUCT] = b @ moved_a + moved_b @ (a + moved_a)
        return result

    def factor_difference(
        self, change: Mapping[str, T], present: Mapping[str, T]
    ) -> dict[str, T]:
        """Convert a change of products to a change of the factors, as exactly as the adapter's rank allows.

        ``change``: changes of products and of other parameters. ``present``: the parameters that the result is added
        to.
        """
        result = dict(change)
        for stem in self.stems:
            a, b = present[stem + DOWN], present[stem + UP]
            wanted = (b.double() @ a.double()) + result.pop(stem + PRODUCT).double()
            left, sizes, right = torch.linalg.svd(wanted, full_matrices=False)
            rank = a.shape[0]
            # as many singular values as there are; further rows and columns are zero
            count = min(rank, len(sizes))
            root = sizes[:count].sqrt()
            new_a, new_b = torch.zeros_like(a), torch.zeros_like(b)
            new_a[:count] = (root[:, None] * right[:count]).to(a.dtype)
            new_b[:, :count] = (left[:, :count] * root).to(b.dtype)
            result[stem + DOWN] = new_a - a
            result[stem + UP] = new_b - b
        return result
