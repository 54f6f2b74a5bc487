"""The section ``[train]``: how long a run is, and how it computes."""

from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from weft.section import Section

Dtype = Literal["float64", "float32", "bfloat16"]


class Train(Section):
    """Section of the training run: its length, batch size, number format and the like.

    A run ends at ``steps`` or ``data.epochs``, whichever is earlier.
    """

    steps: int = Field(
        100,
        ge=0,
        description=(
            "Number of optimizer steps; 0: as many as data.epochs needs. Left out: 100, or "
            "until data.epochs is reached."
        ),
    )
    batch: int = Field(
        8,
        gt=0,
        le=10_000_000,
        description="Sequences in one step, over all ranks together (global batch size).",
    )
    micro_batch: int | None = Field(
        None,
        gt=0,
        le=10_000_000,
        description=(
            "Sequences that a rank processes at once; smaller ones take less memory (gradient "
            "accumulation). Left out: all of a rank's, or with a pipeline enough microbatches "
            "to fill it."
        ),
    )
    dtype: Dtype = Field(
        "float32",
        description=(
            "Number format of the computation. With bfloat16 the weights are still kept in "
            "float32."
        ),
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description=(
            "Save memory by recomputing activations in backward (activation checkpointing): "
            "none, cheap ones ('selective') or all ('full')."
        ),
    )
    compile: bool = Field(
        False, description="Compile the model's blocks with torch.compile."
    )
    freeze: tuple[str, ...] = Field(
        (),
        description="Parameters that stay as they are, as patterns of names such as 'embedding.*'.",
    )
    loss_chunk: PositiveInt = Field(
        1024,
        description="Tokens whose logits are computed at once. Smaller chunks take less memory.",
    )
    seed: int = Field(
        0,
        description="Seed of the initial weights and of other random choices in training.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device to compute on; 'auto': the GPU if there is one."
    )
    threads: int = Field(
        0,
        ge=0,
        description="CPU threads of each rank; 0: the cores divided by the ranks of this machine.",
    )
    timeout: PositiveInt = Field(
        600,
        description="Seconds that a rank waits for the others before the run ends with an error.",
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
