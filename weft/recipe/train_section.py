"""The section ``[train]``: how long a run is, and how it computes."""

from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from weft.section import Section

Dtype = Literal["float64", "float32", "bfloat16"]


class Train(Section):
    """Section on the training run: its length, batch size, number format and the like.

    A run ends at ``steps`` or ``data.epochs``, whichever is earlier.
    """

    steps: int = Field(
        100,
        ge=0,
        description=(
            "Number of optimizer steps, unless data.epochs ends the run earlier. 0: only data.epochs ends it. If not "
            "set: 0 if data.epochs is set, else 100."
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
            "Sequences that a rank processes at once. Gradients are accumulated until its share of the batch is "
            "done; smaller numbers take less memory. If not set: the whole share, or with a pipeline so few that a "
            "rank has about 2 x layout.pp microbatches."
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
            "What backward computes again instead of keeping activations from forward, to "
            "save memory (activation checkpointing): nothing ('none'), all except attention "
            "and exchanges between ranks ('selective'), or everything ('full')."
        ),
    )
    compile: bool = Field(
        False, description="Compile the model's blocks with torch.compile."
    )
    freeze: tuple[str, ...] = Field(
        (),
        description=(
            "Parameters that are not trained, as patterns of their names such as 'embedding.*'. Empty: no "
            "parameter is frozen by this setting."
        ),
    )
    loss_chunk: PositiveInt = Field(
        1024,
        description=(
            "Number of tokens whose logits are in memory at once. Smaller chunks take less "
            "memory."
        ),
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
