"""Rows of several tensors as one tensor of bytes, which travels in one message."""

from collections.abc import Sequence

import torch

T = torch.Tensor


def join_rows(*columns: T) -> T:
    """Join the rows of ``columns``, each ``[rows, width]`` of any type, to rows of bytes: uint8 ``[rows, bytes]``."""
    return torch.cat([each.contiguous().view(torch.uint8) for each in columns], 1)


def split_rows(rows: T, like: Sequence[T]) -> list[T]:
    """Cut rows of bytes that :func:`join_rows` has joined into tensors of the widths and types of ``like``.

    ``rows``: uint8 ``[rows, bytes]``; of ``like`` only widths and types count. Each result is ``[rows, width]``.
    """
    widths = [each.shape[1] * each.element_size() for each in like]
    return [
        # a copy begins where numbers of its type may begin
        part.clone(memory_format=torch.contiguous_format).view(each.dtype)
        for part, each in zip(rows.split(widths, 1), like, strict=True)
    ]
