"""One of several ranks: whether this process is one, how it joins the others, and how it leaves them."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from weft.errors import UsageError, WeftError
from weft.memory.heap import keep_heap

if TYPE_CHECKING:
    import torch

#: Where in the store every rank of a run that survives the loss of others says where it is.
MEMBERS = "weft/member"
#: The exit code of a rank that the others have gone on without.
LEFT_OUT = 75


def in_ranks() -> bool:
    """Return whether this process is one of several ranks that a launcher (Weft's, torchrun's or Slurm's) has started.

    For Slurm, also set the environment variables of ``torch.distributed``.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        os.environ.update(slurm_ranks(os.environ))
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def slurm_ranks(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of ``torch.distributed``, derived from those of a Slurm job step in ``env``.

    Returns {} in a batch script, whose process is no rank.
    """
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) < 2 or "SLURM_PROCID" not in env:
        return {}
    per_node: list[str] = []  # of "1(x1),2(x2)": 1, 2, 2
    for count, times in re.findall(
        r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "1")
    ):
        per_node += [count] * int(times or 1)
    # Of "gpu[007-009,12]-ib,old3" the first is gpu007-ib.
    nodes = re.sub(r"\[(\d+)[^]]*]", r"\1", env.get("SLURM_STEP_NODELIST", "localhost"))
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": per_node[
            min(int(env.get("SLURM_NODEID", "0")), len(per_node) - 1)
        ],
        "MASTER_ADDR": env.get("MASTER_ADDR", nodes.partition(",")[0]),
        "MASTER_PORT": env.get(
            "MASTER_PORT", str(20_000 + int(env.get("SLURM_JOB_ID", "0")) % 10_000)
        ),
    }


def threads_per_rank(requested: int, local_world: int) -> int:
    """Return the number of threads that a rank uses: ``requested``, or for 0 an equal share of this process's cores.

    ``local_world``: number of ranks on this machine, which share the cores.
    """
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    return requested or max(1, cores // local_world)


def backend_of(device: str) -> "tuple[str, torch.device | None]":
    """Return the process group backend for ``device`` ("cpu" or "cuda"), and this rank's GPU (None for "cpu").

    The GPU becomes the current device. Raises :class:`UsageError` if this machine has more ranks than GPUs.
    """
    import torch

    if device != "cuda":
        return "gloo", None
    local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if gpus == 1 and "SLURM_PROCID" in os.environ:
        local = 0  # Slurm can show each task its own GPU only
    if local >= gpus:
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "more")
        raise UsageError(
            f"{ranks} ranks on this machine, {gpus} GPUs; start fewer ranks or set train.device=cpu"
        )
    torch.cuda.set_device(local)
    return "nccl", torch.device("cuda", local)


def init_ranks(device: str, timeout_s: int) -> None:
    """Create the default process group: gloo for the ``device`` "cpu", NCCL for "cuda" with one GPU per local rank.

    ``timeout_s``: seconds that ranks wait for each other. A process that no launcher has started is the only rank.
    Raises :class:`WeftError` if not all ranks come in time.
    """
    import torch.distributed as dist

    if "RANK" not in os.environ:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    backend, index = backend_of(device)
    try:
        dist.init_process_group(
            backend, timeout=timedelta(seconds=timeout_s), device_id=index
        )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        given = "rank {RANK} did not meet all {WORLD_SIZE} ranks at {MASTER_ADDR}:{MASTER_PORT}".format(
            **os.environ
        )
        raise WeftError(
            f"{given} in {timeout_s} s; check that all were started and can reach that port"
        ) from error


def settle_in(device: str, threads: int = 0) -> None:
    """Prepare this process to be a training rank.

    ``device``: "cpu" or "cuda"; on "cpu" the process keeps freed memory for itself. ``threads``: number of threads, 0
    for an equal share of the cores.
    """
    import torch

    torch.set_num_threads(
        threads_per_rank(threads, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    )
    if device == "cpu":
        keep_heap()


def own_device(device: str) -> str:
    """Return the PyTorch device on which this rank trains: "cpu", or for the ``device`` "cuda" the current GPU."""
    import torch

    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else "cpu"


@contextlib.contextmanager
def rank_process(device: str, timeout_s: int, threads: int = 0) -> Iterator[None]:
    """Make this process a working rank, one of those that were started together, while the context lasts.

    ``device``: "cpu" or "cuda"; ``timeout_s``: seconds that ranks wait for each other; ``threads``: number of threads,
    0 for an equal share of the cores. At the end of the context all ranks wait for each other, so that none closes
    connections that another still uses.
    """
    import torch.distributed as dist

    settle_in(device, threads)
    init_ranks(device, timeout_s)
    try:
        yield
    except BaseException:
        if "RANK" not in os.environ:  # nobody waits for this process, which may live on
            dist.destroy_process_group()
        raise
    if dist.get_world_size() > 1:
        dist.barrier()
    dist.destroy_process_group()
