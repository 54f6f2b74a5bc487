"""The stages of a pipeline that a rank holds, and the stages that compute with a parameter."""

from dataclasses import dataclass

from weft.layout.mesh import Mesh
from weft.parallel.overlap import layer_stages, with_turns
from weft.recipe import ModelShape
from weft.schedule.actions import Table
from weft.schedule.stages import Stage, assign_stages, make_table
from weft.schedule.vocab import share_stage
from weft.shapes.parameters import VALUE_HEAD


@dataclass(frozen=True)
class HeldStages:
    """The pipeline stages of a model under a layout, and which of them this rank holds.

    Attributes:
        ``shape``, ``mesh``: the model and the layout over ranks.
        ``seq_len``: tokens of a sequence.
        ``cut``: the stages that are assigned to ranks, each with consecutive layers.
        ``stages``: the stages that schedules name: those of ``cut``, or under ``layout.overlap`` one for each layer.
        ``held``: indices in ``stages`` of the stages that this rank holds.
        ``holders``: for each of ``stages``, the ranks along ``pp`` that hold it.
    """

    shape: ModelShape
    mesh: Mesh
    seq_len: int
    cut: tuple[Stage, ...]
    stages: tuple[Stage, ...]
    held: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]

    def table(self, microbatches: int, skipping: bool = True) -> Table:
        """Build the pipeline schedule for ``microbatches`` microbatches, without the transfers between ranks.

        With ``skipping`` microbatches skip stages as ``layout.skip`` says; without it they pass all stages.
        """
        layout = self.mesh.layout
        asked = layout if skipping else layout.model_copy(update={"skip": 0.0})
        table = make_table(asked, microbatches, self.shape, self.seq_len)
        return with_turns(table, self.cut, layout) if layout.takes_turns else table

    @property
    def layers(self) -> set[int]:
        """The indices of the model's layers that this rank holds."""
        return {layer for s in self.held for layer in self.stages[s].layers}

    @property
    def ends(self) -> set[str]:
        """The parts outside of layers that this rank holds: any of "embedding", "norm" and "head"."""
        last = len(self.stages) - 1 in self.held
        if self.mesh.layout.vocab_barriers:
            return {"embedding", "head"} | ({"norm"} if last else set())
        held = [self.stages[s] for s in self.held]
        ends = {"embedding"} if any(stage.embedding for stage in held) else set()
        return ends | ({"norm", "head"} if any(stage.head for stage in held) else set())

    def users(self, name: str) -> list[int]:
        """List the indices of this rank's stages that compute with the parameter ``name``.

        A share of a parameter that is cut over the vocabulary counts as a stage of its own in schedules. For such a
        parameter the list has only the index of this rank's share: the number of stages plus the rank along ``pp``.
        """
        if self._of_vocabulary(name):
            return [share_stage(len(self.stages), self.mesh.rank("pp"))]
        return [s for s in self._stages_with(name) if s in self.held]

    def copies(self, name: str) -> tuple[int, ...]:
        """Return the ranks along ``pp`` that hold the parameter ``name``; several, if several stages use it."""
        if self._of_vocabulary(name):
            return (self.mesh.rank("pp"),)
        ranks = {r for s in self._stages_with(name) for r in self.holders[s]}
        return tuple(sorted(ranks))

    def _of_vocabulary(self, name: str) -> bool:
        return bool(self.mesh.layout.vocab_barriers) and name.startswith(
            ("embedding", "head")
        )

    def _stages_with(self, name: str) -> list[int]:
        """List the stages of all ranks that compute with a parameter outside of the vocabulary shares."""
        kind, _, rest = name.partition(".")
        if kind in ("norm", VALUE_HEAD):
            return [len(self.stages) - 1]
        # of a diffusion transformer, whose blocks all read it
        if kind == "conditioning":
            return list(range(len(self.stages)))
        table, head = (
            kind == "embedding",
            kind in ("head", "outputs") or self.shape.tied,
        )

        def computes(stage: Stage) -> bool:
            if kind == "blocks":
                return int(rest.partition(".")[0]) in stage.layers
            return (table and stage.embedding) or (head and stage.head)

        return [s for s, stage in enumerate(self.stages) if computes(stage)]


def hold_stages(shape: ModelShape, mesh: Mesh, seq_len: int) -> HeldStages:
    """Assign the layers of a model to stages, and stages to ranks, such that the slowest stage is as fast as possible.

    ``seq_len``: tokens of a sequence, from which the time of attention follows.
    """
    layout = mesh.layout
    table = make_table(layout, 2 * mesh.size("pp"), shape, seq_len)
    cut = stages = assign_stages(shape, layout, table, seq_len)
    if layout.takes_turns:
        table, stages = with_turns(table, cut, layout), layer_stages(cut)
    holders = tuple(table.holders(s) for s in range(table.stages))
    return HeldStages(
        shape, mesh, seq_len, cut, stages, table.held(mesh.rank("pp")), holders
    )
