"""Secondary partitions on FSDP2, which needs a private function of it: here, and nowhere else.

Told a number of ranks (``reshard_after_forward=N``), FSDP2 makes new process groups for every block, and of the ranks
of one data mesh only: ranks of ``tp`` and ``pp`` would not agree on them. So it is handed the groups of one mesh that
all ranks have made together. Tried with PyTorch 2.13.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from weft.errors import WeftError
from weft.layout.mesh import Mesh


@contextmanager
def near_groups(mesh: Mesh) -> Iterator[None]:
    """In here FSDP2 keeps parameters over the groups of ``mesh.near_mesh`` where it is told a number of ranks."""
    if mesh.near_mesh is None:
        yield
        return
    try:
        from torch.distributed.fsdp._fully_shard import _fully_shard as fsdp
        from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

        near = HSDPMeshInfo(mesh.near_mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        patch = mock.patch.object(fsdp, "_get_post_forward_mesh_info", lambda after, over: near)
        patch.start()
    except (ImportError, AttributeError, TypeError) as error:
        raise WeftError(f"layout.secondary does not work with this PyTorch ({error}); leave it out") from None
    try:
        yield
    finally:
        patch.stop()
