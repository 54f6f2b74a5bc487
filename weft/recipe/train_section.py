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
            "Number of optimizer steps in the run, unless data.epochs ends it earlier. 0: only data.epochs ends it. "
            "If not set: 0 with data.epochs, else 100."
        ),
    )
    batch: int = Field(
        8,
        gt=0,
        le=10_000_000,
        description="Number of sequences in one optimizer step, over all ranks together (global batch size).",
    )
    micro_batch: int | None = Field(
        None,
        gt=0,
        le=10_000_000,
        description=(
            "Number of sequences that a rank processes in one pass; gradients accumulate until its share of 'batch' "
            "is done. Smaller numbers take less memory. If not set: the whole share at once, or in a pipeline so "
            "few that each rank has about 2 x layout.pp passes per step."
        ),
    )
    dtype: Dtype = Field(
        "float32",
        description=(
            "Number format of the computation. With 'bfloat16', weights are still kept and updated in float32."
        ),
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description=(
            "Which activations backward computes again instead of keeping them from forward, to save memory "
            "(activation checkpointing). 'none': it keeps all; 'selective': it keeps those of attention and of "
            "exchanges between ranks; 'full': it keeps only the inputs of blocks."
        ),
    )
    compile: bool = Field(
        False,
        description=(
            "Compile the blocks of the model with torch.compile. This takes time at the start and makes later steps "
            "faster."
        ),
    )
    freeze: tuple[str, ...] = Field(
        (),
        description=(
            "Parameters that are not trained, as patterns of their names, such as 'embedding.*'. Empty: all are "
            "trained, except those that an adapter freezes."
        ),
    )
    loss_chunk: PositiveInt = Field(
        1024,
        description=(
            "Number of tokens whose logits are in memory at the same time. Smaller numbers take less memory."
        ),
    )
    seed: int = Field(
        0,
        description=(
            "Seed of the initial weights and of other random numbers in training, such as those of dropout. "
            "data.seed is for the order of the data."
        ),
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="Device to compute on. 'auto': the GPU if there is one, else the CPU.",
    )
    threads: int = Field(
        0,
        ge=0,
        description="Number of CPU threads of each rank. 0: the cores of a machine divided by its number of ranks.",
    )
    timeout: PositiveInt = Field(
        600,
        description="Seconds that a rank waits for other ranks before the run ends with an error.",
    )
    planned: tuple[str, ...] = Field(
        (),
        description=(
            "Settings that the planner has chosen because nobody has set them, such as 'layout' and "
            "'train.recompute'. Weft writes this list for itself: 'weft train --resume RUN --ranks N' has them chosen "
            "again."
        ),
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
