"""Environment variables by which launchers tell a process that it is a rank."""

from __future__ import annotations

import os
import re

#: Variables by which launchers tell a process that it is a rank, which an engine is not.
RANK_VARIABLES = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|WEFT_LAUNCHED|GROUP_RANK|ROLE_.*"
    r"|TORCHELASTIC_.*|SLURM_.*)"
)


def environment_without_ranks() -> dict[str, str]:
    """Return the environment variables of this process without those that make a process a rank."""
    return {
        name: value
        for name, value in os.environ.items()
        if not RANK_VARIABLES.fullmatch(name)
    }
