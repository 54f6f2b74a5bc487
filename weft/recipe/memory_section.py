"""The section ``[memory]``: where tensors rest while they are not in use."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from weft.refusal import Asked, Rule, refuse
from weft.section import Section

#: Where tensors can rest while they are not in use, the nearest first.
PLACES = ("device", "host", "file")


Place = Literal["device", "host", "file"]


class Memory(Section):
    """Section on where tensors are kept while not in use: on the device, in the host's memory, or in a file.

    ZeRO-Offload (Ren et al. 2021), SuperOffload (Lian et al. 2025), Deep Optimizer States (Maurya et al. 2024).
    """

    asks: ClassVar = {"speculate": "speculation", "alternate": "alternating-updates",
                         "tiles": "tiled-weights", "embedding": "embedding-rows"}  # fmt: skip

    weights: Place = Field(
        "device",
        description=(
            "Where the weights in full precision are kept and updated: on the device ('device'), in the host's "
            "memory ('host') or in a file ('file'). With 'host' and 'file' the host's CPU updates them."
        ),
    )
    gradients: Literal["", "device", "host", "file"] = Field(
        "",
        description=(
            "Where gradients are kept from backward until the update: on the device, in the host's memory or in a "
            "file. Empty: where 'weights' are."
        ),
    )
    moments: Literal["", "device", "host", "file"] = Field(
        "",
        description=(
            "Where the optimizer's moments are kept: on the device, in the host's memory or in a file. Empty: where "
            "'weights' are."
        ),
    )
    activations: Place = Field(
        "device",
        description=(
            "Where activations of the first blocks are kept between forward and backward: on the device, in the "
            "host's memory or in a file. How many blocks these are is set by 'blocks'; activations of the other "
            "blocks stay on the device."
        ),
    )
    blocks: int = Field(
        0,
        ge=0,
        description=(
            "For activations = 'host' or 'file': number of blocks, from the first one on, whose activations are "
            "moved there. 0: as many as can be moved without making the computation wait."
        ),
    )
    folder: str = Field(
        ".",
        description=(
            "Folder on a local disk for the files of tensors that are kept in files. They are deleted when the run "
            "ends."
        ),
    )
    buffer: int = Field(
        0,
        ge=0,
        description=(
            "For weights = 'file': MiB of extra memory in which weights stay after forward, so that backward need "
            "not read them again. 0: backward reads all of them again."
        ),
    )
    read_ahead: bool = Field(
        True,
        description=(
            "For weights, gradients and moments in files: whether those of the next block or tile are read while the "
            "present one computes, and written while the next one computes. False: only one block or tile is in "
            "memory at a time, and computation waits for all transfers."
        ),
    )
    experts: Literal["all", "chosen"] = Field(
        "all",
        description=(
            "Which experts of a mixture each pass reads from files: all ('all'), or only those that the router "
            "chooses for its tokens ('chosen'). With 'chosen', reading begins before the router has run, with "
            "experts that it will probably choose."
        ),
    )
    speculate: Literal["none", "even", "all"] = Field(
        "none",
        description=(
            "Whether parameters are updated during backward already, before the norm of all gradients is known, and "
            "updates are undone if gradients turn out to need clipping. 'none': no; 'all': all parameters; 'even': "
            "so many that reading and writing of files is spread evenly over a step (without files as 'all')."
        ),
    )
    alternate: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = Field(
        0.0,
        description=(
            "For weights and moments in the host's memory: share of the weights that the device updates while the "
            "host updates the others. 0: the host updates all. 'auto': the fastest share, measured in the first "
            "steps."
        ),
    )

    tiles: int = Field(
        1,
        ge=1,
        description=(
            "Number of tiles (ranges of rows) into which the weights of projections are cut. Tiles kept on the host "
            "or in a file are read, used and freed one by one, so that a whole weight never takes up memory of the "
            "device. 1: weights are not cut."
        ),
    )

    embedding: Literal["whole", "rows"] = Field(
        "whole",
        description=(
            "Which rows of the embedding a pass reads from the host or a file, and writes back after an update: all "
            "rows ('whole'), or only those of the tokens in its batch ('rows')."
        ),
    )

    @property
    def by_table(self) -> bool:
        """Whether the actions of a schedule gather and free the weights even without a pipeline.

        This is so if weights rest in files, or if they are brought to the device in parts (tiles or rows).
        """
        parts = self.tiles > 1 or self.embedding == "rows"
        return self.weights == "file" or parts

    def place_of(self, kind: str) -> str:
        """Return where tensors of a kind are kept: ``device``, ``host`` or ``file``.

        ``kind``: ``weights``, ``gradients``, ``moments`` or ``activations``.
        """
        return getattr(self, kind) or self.weights

    def distance(self, kind: str) -> int:
        return PLACES.index(self.place_of(kind))

    @property
    def away(self) -> dict[str, str]:
        """Place (``host`` or ``file``) of each kind of tensor that is not kept on the device, by kind."""
        kinds = ("weights", "gradients", "moments", "activations")
        return {kind: self.place_of(kind) for kind in kinds if self.distance(kind)}

    @property
    def offloads_state(self) -> bool:
        return self.weights != "device"

    @property
    def offloads_activations(self) -> bool:
        return self.activations != "device"

    @field_validator("folder")
    @classmethod
    def _local(cls, folder: str) -> str:
        if "://" in folder:  # which would be a folder of that name, here
            raise ValueError("it should be a folder of this computer, on a local disk")
        return folder

    @model_validator(mode="after")
    def _together(self) -> Self:
        refuse(AskedMemory(memory=self), MEMORY_RULES)
        return self


class AskedMemory(Asked):
    """The recipe's section ``[memory]``, with values that the rules against conflicts use in conditions and
    messages.
    """

    memory: Memory


#: What places cannot combine, whatever else is asked for.
MEMORY_RULES: tuple[Rule[AskedMemory], ...] = (
    Rule("moments nearer than the weights", "memory",
         lambda a: a.memory.distance("moments") < min(a.memory.distance("weights"), 1),
         "memory.weights = {0.memory.weights!r} says where the update runs, and memory.moments = "
         "{0.memory.moments!r} is nearer to the device", "leave memory.moments out"),
    Rule("gradients away from the weights", "memory",
         lambda a: a.memory.distance("gradients") not in (
             (1, 2) if a.memory.weights == "file" else (a.memory.distance("weights"),)),
         "memory.gradients = {0.memory.gradients!r} is not where the update needs them, with memory.weights = "
         "{0.memory.weights!r}", "leave memory.gradients out"),
    Rule("room for weights that do not leave", "memory", lambda a: a.memory.buffer > 0 and a.memory.weights != "file",
         "memory.buffer = {0.memory.buffer} is room for weights that come from a file, and memory.weights = "
         "{0.memory.weights!r}", "set memory.weights = 'file', or leave memory.buffer out"),
    Rule("reads ahead of nothing", "memory",
         lambda a: not a.memory.read_ahead
         and "file" not in [a.memory.place_of(kind) for kind in ("weights", "gradients", "moments")],
         "memory.read_ahead = false is for state that is read from files, and memory.weights = {0.memory.weights!r}",
         "set memory.weights = 'file', or leave memory.read_ahead out"),
    Rule("blocks of what stays", "memory", lambda a: a.memory.blocks > 0 and not a.memory.offloads_activations,
         "memory.blocks = {0.memory.blocks} says how many blocks' activations leave, and memory.activations = 'device' "
         "keeps all", "set memory.activations to 'host' or 'file', or leave memory.blocks out"),
    Rule("alternating updates away from the host", "memory",
         lambda a: a.memory.alternate != 0 and {a.memory.place_of(k) for k in ("weights", "moments")} != {"host"},
         "memory.alternate = {0.memory.alternate!r} shares updates of what rests on the host with the device, and here "
         "weights are in {0.memory.weights!r}", "set memory.weights = 'host' and leave memory.moments out, or leave "
         "memory.alternate out"),
)  # fmt: skip
