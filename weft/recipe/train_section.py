"""The section ``[train]``: how long a run is, and how it computes."""

from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from weft.section import Section

Dtype = Literal["float64", "float32", "bfloat16"]


class Train(Section):
    """One training run.

    ``steps``: the run ends after so many; left out, 100, or where ``data.epochs`` are over. Of the two the earlier end
    counts. ``batch`` counts sequences per step over all ranks; ``micro_batch`` per rank and pass.
    """

    steps: int = Field(100, ge=0, description="0: as many as data.epochs need")
    batch: int = Field(8, gt=0, le=10_000_000)
    micro_batch: int | None = Field(None, gt=0, le=10_000_000)
    dtype: Dtype = "float32"
    recompute: Literal["none", "selective", "full"] = "none"
    compile: bool = False
    freeze: tuple[str, ...] = Field(
        (), description="patterns of parameters that do not learn, e.g. 'embedding.*'"
    )
    loss_chunk: PositiveInt = 1024
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(
        0,
        ge=0,
        description="threads per rank; 0 divides the cores among the local ranks",
    )
    timeout: PositiveInt = Field(
        600, description="seconds a rank waits for the others in a collective"
    )

    @model_validator(mode="before")
    @classmethod
    def _offload(cls, tree: Any) -> Any:
        """Older recipes say ``offload`` for what stands in ``[memory]`` now."""
        if not isinstance(tree, dict) or "offload" not in tree:
            return tree
        kinds: dict[str, tuple[str, ...]] = {
            "none": (),
            "optimizer": ("weights",),
            "activations": ("activations",),
        }
        if now := kinds.get(str(tree["offload"]), ("weights", "activations")):
            said = " and ".join(f"memory.{kind} = 'host'" for kind in now)
            raise ValueError(f"offload = {tree['offload']!r} is now {said}")
        return {key: value for key, value in tree.items() if key != "offload"}
