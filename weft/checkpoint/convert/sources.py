"""Open checkpoints of other programs under Weft's names. Tensors are read on demand."""

from pathlib import Path

import torch

from weft.checkpoint.address import Where, open_storage
from weft.checkpoint.boxes import MOMENTS, ROOT
from weft.checkpoint.convert.foreign import Foreign, naming
from weft.checkpoint.convert.rules import (
    Shard,
    TensorSource,
    own_source,
    sources_by_name,
)
from weft.checkpoint.hub import local_path
from weft.checkpoint.source_format import newest_save
from weft.checkpoint.storage import LocalStorage
from weft.checkpoint.store import (
    candidates,
    learned_length,
    model_of,
    open_checkpoint,
    stored_files,
)
from weft.errors import UsageError, WeftError, nearest
from weft.layout.dims import whole_box
from weft.layout.parts import TORCH_DTYPES, Part
from weft.registry import KINDS, declared, find, names
from weft.shapes.parameters import VALUE_HEAD, without_critic

#: The format that needs no technique.
WEFT = "weft"


def open_foreign(
    source: Where, kind: str | None = None, config: Path | None = None
) -> Foreign:
    """Open the checkpoint at ``source`` for conversion.

    ``kind``: format of the checkpoint, by default the format that its file names suggest; ``config``: the model's
    ``config.json``, if it lies elsewhere. Only Weft's checkpoints may be in remote storage. Raises :class:`WeftError`
    if the checkpoint is missing, damaged or of no known format, and :class:`UsageError` for an unknown ``kind``.
    """
    source = local_path(str(source))
    place, path = open_storage(source), Path(source)
    elsewhere = not isinstance(place, LocalStorage)
    if not (elsewhere or path.exists()):
        raise WeftError(f"{path} does not exist; give a checkpoint")
    kind = kind or (WEFT if elsewhere else checkpoint_format(path))
    choices = KINDS["format"].choices(names("format"))
    if kind is None:
        known = ", ".join(choices)
        raise WeftError(
            f"{path} is no checkpoint that Weft knows ({known}); say which it is with --from"
        )
    if kind not in choices:
        raise UsageError(f"--from {kind!r} is not possible; {nearest(kind, choices)}")
    if elsewhere and kind != WEFT:
        raise UsageError(
            f"--from {kind} reads folders only; copy {place} to this machine first"
        )
    # one that cannot be imported is no fault of the checkpoint
    reader = None if kind == WEFT else find("format", kind).implementation
    try:
        if reader is None:
            return _weft(place if elsewhere else path)
        opened: Foreign = reader.open(path, config)
        return opened
    except WeftError as error:
        raise naming(path, error) from None


def _weft(where: Where) -> Foreign:
    checkpoint = open_checkpoint(candidates(where)[0])

    def shard(name: str) -> Shard:
        about = checkpoint.tensors[name]
        dtype = TORCH_DTYPES[about.dtype]

        def read(lo: int, hi: int) -> torch.Tensor:
            out = torch.empty(hi - lo, *about.shape[1:], dtype=dtype)
            checkpoint.load(
                {name: Part(out, ((lo, hi), *whole_box(about.shape[1:])), about)}
            )
            return out

        return Shard(about.shape, dtype, read)

    def under(prefix: str) -> dict[str, TensorSource]:
        shards = {
            n.removeprefix(prefix): shard(n)
            for n in checkpoint.tensors
            if n.startswith(prefix) and n != prefix + VALUE_HEAD
        }
        if model_of(checkpoint).kind:  # whose names are its own
            return {name: own_source(name, each) for name, each in shards.items()}
        return sources_by_name({name: [each] for name, each in shards.items()})

    if model_of(checkpoint).adapter is not None:
        raise WeftError(
            f"{checkpoint} is an adapter alone; weft export writes it as PEFT has it, and with --merge as a Hugging "
            "Face model, which can be converted"
        )
    moments = {
        moment: values
        for moment in MOMENTS
        if (values := under(f"optimizer.{moment}."))
    }
    step = int(checkpoint.meta.get("progress", {}).get("step", 0))
    files = stored_files(checkpoint)
    shape = without_critic(model_of(checkpoint))
    return Foreign(WEFT, checkpoint.storage, shape, under("model."), moments, step, files,
                   learned_length(checkpoint))  # fmt: skip


def checkpoint_format(path: Path) -> str | None:
    """Return the name of the checkpoint format that the file names at ``path`` suggest, such as ``hf``.

    ``path``: an existing file or folder. Returns None if they match no format.
    """
    if path.is_dir():
        folder = newest_save(path)
        own = (ROOT, f"checkpoints/*/{ROOT}", f"*/{ROOT}")
        if any(any(folder.glob(pattern)) for pattern in own):
            return WEFT
    formats = sorted(
        declared("format"), key=lambda technique: technique.implementation.place
    )
    return next((t.name for t in formats if t.implementation.holds(path)), None)
