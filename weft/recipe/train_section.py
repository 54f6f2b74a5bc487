"""The section ``[train]``: how long a run is, and how it computes."""

from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from weft.section import Section

Dtype = Literal["float64", "float32", "bfloat16"]


class Train(Section):
    """One training run. It ends at ``steps`` or ``data.epochs``, whichever is earlier."""

    steps: int = Field(
        100,
        ge=0,
        description="The run ends after so many steps; 0: as many as data.epochs need. Left "
        "out: 100, or where data.epochs are over.",
    )
    batch: int = Field(
        8, gt=0, le=10_000_000, description="Sequences per step over all ranks."
    )
    micro_batch: int | None = Field(
        None,
        gt=0,
        le=10_000_000,
        description="Sequences per rank and pass; left out: all of a rank's, with pp their 2 pp-th part.",
    )
    dtype: Dtype = Field(
        "float32",
        description="Type that is computed in; weights are kept in float32 beside bfloat16.",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="What backward computes again instead of keeping it."
    )
    compile: bool = Field(False, description="Compile blocks with torch.compile.")
    freeze: tuple[str, ...] = Field(
        (), description="Patterns of parameters that do not learn, e.g. 'embedding.*'."
    )
    loss_chunk: PositiveInt = Field(
        1024, description="Tokens whose logits are computed at once."
    )
    seed: int = Field(
        0, description="Seed of initial weights and of all that is drawn in training."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device that ranks compute on."
    )
    threads: int = Field(
        0,
        ge=0,
        description="Threads per rank; 0 divides the cores among the local ranks.",
    )
    timeout: PositiveInt = Field(
        600, description="Seconds a rank waits for the others in a collective."
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
