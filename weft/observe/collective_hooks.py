"""Hooks through which every collective and message of this process passes, in eager and in compiled code.

PyTorch has no public interface for this. Its flight recorder lives in the process and dies with it, and with a backend
of our own PyTorch would no longer find gloo and NCCL by their names. So two private things are used, and only here:
methods of ``ProcessGroup`` are replaced (Python code calls them on every thread, autograd's too), and
kernels of the functional collectives, which C++ calls, are registered in front of PyTorch's own. Works with PyTorch
2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

#: What the methods of a process group are called in the record.
METHODS = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "reduce": "reduce", "broadcast": "broadcast",
    "allgather": "all_gather", "_allgather_base": "all_gather", "all_gather_single": "all_gather",
    "allgather_coalesced": "all_gather", "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather", "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "all_to_all", "alltoall_base": "all_to_all", "all_to_all_single": "all_to_all", "gather": "gather",
    "scatter": "scatter", "barrier": "barrier", "send": "send", "recv": "recv", "recv_anysource": "recv",
}  # fmt: skip
#: The same of functional collectives; each has variants.
FUNCTIONAL = {
    "all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all", "broadcast": "broadcast",
}  # fmt: skip
VARIANTS = ("", "_", "_out", "_coalesced", "_coalesced_")


class Recording(Protocol):
    """Receiver of the calls by which the hooks report collectives.

    ``enter`` is called at the begin of a collective, and returns the number of a record. This number is passed to
    ``wait`` when the rank begins to wait for the collective, and to ``leave`` when it has ended or failed.
    """

    def enter(
        self,
        kind: str,
        group: dist.ProcessGroup,
        tensors: Sequence[Any],
        peer: int | None,
    ) -> int: ...
    def wait(self, number: int) -> None: ...
    def leave(self, number: int, failed: bool) -> None: ...


def install(to: Recording) -> Callable[[], None]:
    """Report all collectives to the recording ``to`` from now on. Return a function that removes the hooks."""
    # by identity: work that nobody waits for gives its entry to the next one at its address
    works = dict[int, int]()
    # As they stand in their classes, which the functions that one gets there are not: they would not bind.
    before = {
        name: vars(dist.ProcessGroup)[name]
        for name in METHODS
        if name in vars(dist.ProcessGroup)
    }
    wait_before, wait = vars(dist.Work)["wait"], dist.Work.wait
    for name in before:
        setattr(
            dist.ProcessGroup,
            name,
            _entering(METHODS[name], getattr(dist.ProcessGroup, name), works, to),
        )

    def waiting(work: dist.Work, *args: Any, **options: Any) -> Any:
        number = works.pop(id(work), None)
        return (
            wait(work, *args, **options)
            if number is None
            else _waited(to, number, wait, work, *args, **options)
        )

    dist.Work.wait = waiting  # type: ignore[method-assign, assignment]
    library = _functional(to)

    def uninstall() -> None:
        library._destroy()
        dist.Work.wait = wait_before  # type: ignore[method-assign]
        for name, method in before.items():
            setattr(dist.ProcessGroup, name, method)

    return uninstall


def _entering(
    kind: str, method: Callable[..., Any], works: dict[int, int], to: Recording
) -> Callable[..., Any]:
    to_peer = method.__name__ in ("send", "recv")

    def entering(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
        number = to.enter(kind, group, args, args[1] if to_peer else None)
        try:
            work = method(group, *args, **options)
        except BaseException:
            to.leave(number, True)
            raise
        if work is not None:
            works[id(work)] = number
        return work

    return entering


def _waited(
    to: Recording, number: int, wait: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    to.wait(number)
    failed = True
    try:
        result = wait(*args, **options)
        failed = False
        return result
    finally:
        to.leave(number, failed)


def _functional(to: Recording) -> torch.library.Library:
    """Register kernels that call ``to`` and then PyTorch's own. A result's memory tells which call it belongs to."""
    library, results = (
        torch.library.Library("_c10d_functional", "IMPL"),
        dict[int, int](),
    )
    operators, key = (
        torch.ops._c10d_functional,
        torch._C.DispatchKey.CompositeExplicitAutograd,
    )

    def entering(kind: str, operator: Any) -> Callable[..., Any]:
        def kernel(*args: Any) -> Any:
            name: Any = next(a for a in reversed(args) if isinstance(a, str))
            group = dist.distributed_c10d._resolve_process_group(name)
            number = to.enter(kind, group, args, None)
            result = operator._op_dk(key, *args)
            for tensor in result if isinstance(result, list) else [result]:
                results[tensor.data_ptr()] = number
            return result

        return kernel

    def waiting(tensor: torch.Tensor) -> Any:
        number, wait = (
            results.pop(tensor.data_ptr(), None),
            operators.wait_tensor.default._op_dk,
        )
        return (
            wait(key, tensor)
            if number is None
            else _waited(to, number, wait, key, tensor)
        )

    for device in ("CPU", "CUDA"):
        library.impl("wait_tensor", waiting, device)
        for name, kind in FUNCTIONAL.items():
            for variant in VARIANTS:
                if (operator := getattr(operators, name + variant, None)) is not None:
                    library.impl(
                        name + variant, entering(kind, operator.default), device
                    )
    return library
