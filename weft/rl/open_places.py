"""Opens the places of the processes of roles: on the first rank's host, or on the hosts of a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.net.sockets import own_address
from weft.rl.role_places import LocalPlace, RolePlace

if TYPE_CHECKING:
    from weft.recipe.roles_section import Roles


def run_host(roles: Roles) -> str:
    """Return the address of this host at which the processes of ``roles`` reach the run: that of
    ``roles.rollout.listen``, or where Ray places them, that of this host in its cluster.
    """
    if roles.rollout.address:
        return roles.rollout.address[0]
    if roles.placement == "local":
        return own_address()
    from weft.rl.ray_places import ray_host

    return ray_host()


def open_places(
    roles: Roles, host: str, count: int, device: str, threads: int, wait: float
) -> list[RolePlace]:
    """Return ``count`` places for processes of a role, as ``roles.placement`` says.

    ``host``: host at which the processes have to reach the run. ``device`` and ``threads``: what each of them computes
    with, as in ``[roles.rollout]``. ``wait``: seconds to wait until there is a place. Raises :class:`UsageError` or
    :class:`WeftError` if there is none.
    """
    if roles.placement == "local":
        return [LocalPlace() for _ in range(count)]
    from weft.rl.ray_places import open_ray_places

    return open_ray_places(host, count, device, threads, wait)


def close_places(roles: Roles) -> None:
    """Give back all places of this process, and end what still runs there."""
    if roles.placement == "ray":
        from weft.rl.ray_places import close_ray

        close_ray()
