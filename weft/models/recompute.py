"""Blocks whose activations backward computes again (Chen et al. 2016, 1604.06174), whole or all but attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from weft.models.fused import Tape, current_tape, deferred


def recomputed(
    compute: Callable[..., Any], kept_ops: list[torch._ops.OpOverload], *inputs: Any
) -> Any:
    """Return ``compute(*inputs)``, and recompute it in backward instead of keeping the tensors that it saves
    (activation checkpointing). ``kept_ops``: operators whose results are kept and not computed again.
    """
    tape = current_tape()
    contexts: dict[str, Any] = {}
    if tape is not None:
        contexts["context_fn"] = partial(_recompute_with, tape, kept_ops)
    elif kept_ops:
        selective = partial(create_selective_checkpoint_contexts, kept_ops)
        contexts["context_fn"] = selective
    return checkpoint(
        compute, *inputs, use_reentrant=False, preserve_rng_state=False, **contexts
    )


def _recompute_with(tape: Tape, kept: list[torch._ops.OpOverload]) -> tuple[Any, Any]:
    """Contexts of forward and of recomputation, which may run in another thread, with a split backward."""
    first: Any = nullcontext()
    again: Any = nullcontext()
    if kept:
        first, again = create_selective_checkpoint_contexts(kept)

    @contextmanager
    def recomputing() -> Iterator[None]:
        with again, deferred(tape):
            yield

    return first, recomputing()
