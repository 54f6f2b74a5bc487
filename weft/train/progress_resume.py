"""How runs that take steps of their own, beside the loop that trains language models, go on from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from weft.checkpoint.store import load_newest
from weft.errors import WeftError

if TYPE_CHECKING:
    from weft.checkpoint.load import StoredCheckpoint
    from weft.layout.mesh import Mesh
    from weft.train.runs import Run

V = TypeVar("V")


def check_facts(
    checkpoint: StoredCheckpoint, section: str, facts: Mapping[str, Any], other: str
) -> None:
    """Raise :class:`WeftError` if a run of the recipe's ``section`` cannot continue from ``checkpoint``.

    ``facts``: values that must equal those in the checkpoint, by the setting's name; a name without a dot belongs to
    ``section``. ``other``: words by which the error describes a run whose checkpoints lack this section.
    """
    stored = checkpoint.meta.get(section)
    if stored is None:
        raise WeftError(
            f"{checkpoint} is of {other}, and this recipe has [{section}]; start another run with another --out"
        )
    for key, value in facts.items():
        if stored.get(key) != value:
            name = key if "." in key else f"{section}.{key}"
            raise WeftError(
                f"{checkpoint} has {name} = {stored.get(key)!r}, the recipe {value!r}; restore it, or start another "
                "run with another --out"
            )


def resume_newest(
    run: Run,
    load: Callable[[StoredCheckpoint], V],
    say: Callable[[str], None],
    check: Callable[[StoredCheckpoint], None],
    mesh: Mesh,
) -> tuple[StoredCheckpoint, V]:
    """Load the newest whole checkpoint of ``run``, and let the run save after it. Collective.

    ``load``: function that reads the state from a checkpoint. ``say``: prints a line. ``check``: raises an error for a
    checkpoint of another model. All are passed to :func:`weft.checkpoint.store.load_newest`. Returns the checkpoint and
    the result of ``load``.
    """
    checkpoint, loaded = load_newest(run.sources, load, say, check, mesh.step_group)
    for level in run.levels:
        level.resume_from(checkpoint.storage)
    return checkpoint, loaded
