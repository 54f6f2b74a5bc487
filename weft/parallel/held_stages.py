"""Which stages of a pipeline a rank holds, and which of them compute with a parameter."""

from dataclasses import dataclass

from weft.layout.mesh import Mesh
from weft.parallel.overlap import layer_stages, with_turns
from weft.recipe import ModelShape
from weft.schedule.actions import Table
from weft.schedule.stages import Stage, assign_stages, make_table
from weft.schedule.vocab import share_stage


@dataclass(frozen=True)
class HeldStages:
    """The stages of a model under a layout, the ranks that hold each (``holders``), and those of this rank (``held``).

    ``cut``: the stages that ranks hold whole; where passes take turns, ``stages`` has one for each layer of these.
    """

    shape: ModelShape
    mesh: Mesh
    seq_len: int
    cut: tuple[Stage, ...]
    stages: tuple[Stage, ...]
    held: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]

    def table(self, microbatches: int, skipping: bool = True) -> Table:
        """The schedule of so many microbatches, as built."""
        layout = self.mesh.layout
        asked = layout if skipping else layout.model_copy(update={"skip": 0.0})
        table = make_table(asked, microbatches, self.shape, self.seq_len)
        return with_turns(table, self.cut, layout) if layout.overlap else table

    @property
    def layers(self) -> set[int]:
        """The layers of this rank."""
        return {layer for s in self.held for layer in self.stages[s].layers}

    @property
    def ends(self) -> set[str]:
        """The model's ends that this rank has."""
        last = len(self.stages) - 1 in self.held
        if self.mesh.layout.vocab_barriers:
            return {"embedding", "head"} | ({"norm"} if last else set())
        ends = (
            {"embedding"} if any(self.stages[s].embedding for s in self.held) else set()
        )
        heads = any(self.stages[s].head for s in self.held)
        return ends | ({"norm", "head"} if heads else set())

    def users(self, name: str) -> list[int]:
        """The stages on this rank that compute with parameter ``name``: of a share of the vocabulary, a virtual one."""
        if self._of_vocabulary(name):
            return [share_stage(len(self.stages), self.mesh.rank("pp"))]
        return [s for s in self._stages_with(name) if s in self.held]

    def copies(self, name: str) -> tuple[int, ...]:
        """The ranks along ``pp`` that hold parameter ``name``."""
        if self._of_vocabulary(name):
            return (self.mesh.rank("pp"),)
        return tuple(
            sorted({r for s in self._stages_with(name) for r in self.holders[s]})
        )

    def _of_vocabulary(self, name: str) -> bool:
        return bool(self.mesh.layout.vocab_barriers) and name.startswith(
            ("embedding", "head")
        )

    def _stages_with(self, name: str) -> list[int]:
        """The stages, on any rank, that compute with parameter ``name`` (not one of the vocabulary shares')."""
        kind, _, rest = name.partition(".")
        stages = enumerate(self.stages)
        if kind == "blocks":
            layer = int(rest.partition(".")[0])
            return [s for s, stage in stages if layer in stage.layers]
        if kind == "norm":
            return [len(self.stages) - 1]
        head = kind in ("head", "outputs") or self.shape.tied
        table = kind == "embedding"
        return [
            s
            for s, stage in stages
            if (table and stage.embedding) or (head and stage.head)
        ]


def hold_stages(shape: ModelShape, mesh: Mesh, seq_len: int) -> HeldStages:
    """Assign the layers of a model to stages, and stages to ranks; ``seq_len`` weighs attention."""
    layout = mesh.layout
    table = make_table(layout, 2 * mesh.size("pp"), shape, seq_len)
    cut = stages = assign_stages(shape, layout, table.stages, seq_len)
    if layout.overlap:
        table, stages = with_turns(table, cut, layout), layer_stages(cut)
    holders = tuple(table.holders(s) for s in range(table.stages))
    return HeldStages(
        shape, mesh, seq_len, cut, stages, table.held(mesh.rank("pp")), holders
    )
