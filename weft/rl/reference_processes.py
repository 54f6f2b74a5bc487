"""The reference model of reinforcement learning in processes of its own, as the ranks that train use it.

The first rank starts the processes on its host, sends them texts, and gets log-probabilities, while all ranks compute
what else the loss needs. A process that ends or hangs ends the run with a line that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weft.rl.recorded_loader import shares_prompts
from weft.rl.text_processes import TextProcesses

if TYPE_CHECKING:
    import numpy as np

    from weft.layout.mesh import Mesh
    from weft.rl.rl_phases import RlPhases


def reference_about(job: RlPhases) -> dict[str, Any]:
    """Return JSON values that tell a process which reference model to build, and how texts are computed."""
    recipe, role = job.recipe, job.roles.reference
    named = job.named_reference
    rows, passes = recipe.rows_per_pass(role.process_layout)
    shape = named.shape if named else job.shape
    return {
        "shape": shape.model_dump(mode="json"),
        "model": role.model or recipe.model.origin or "",
        "train": recipe.train.model_dump(mode="json"),
        "layout": role.process_layout.model_dump(mode="json"),
        "device": role.device.partition(":")[0],
        "threads": role.threads,
        "timeout": recipe.train.timeout,
        "rows": rows,
        "passes": passes,
        "room": recipe.data.seq_len,
        "temperature": job.rl.temperature,
        "share": shares_prompts(job, role.process_layout, shape),
    }


class ReferenceProcesses(TextProcesses):
    """Log-probabilities under a reference model in other processes. All methods are collective over the ranks of
    ``mesh``; the first rank starts the processes and talks with them.

    ``job``: the checked recipe. ``interrupted``: returns whether this rank is asked to end the run.
    """

    def __init__(
        self, job: RlPhases, mesh: Mesh, interrupted: Callable[[], bool]
    ) -> None:
        super().__init__("reference", job, mesh, reference_about, interrupted)

    def log_probabilities(self) -> list[np.ndarray]:
        """Wait for the log-probabilities of the requested texts, and return for each text float64 ``[n]``, with 0 at
        tokens that are not marked.

        Raises :class:`WeftError` if a process has ended or does not answer in time.
        """
        return self._replied()

    def take_figures(self) -> dict[str, float]:
        """Return the bytes that have travelled since the last call, and the seconds for which the processes have
        computed, by the names of a phase's records.
        """
        now = self._take_travelled()
        return {
            "reference_sent_bytes": now.sent,
            "reference_received_bytes": now.received,
            "reference_s": now.seconds,
        }
