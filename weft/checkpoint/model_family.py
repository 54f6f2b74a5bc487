"""A base model and other models of its shape, opened so that weights with equal content are in memory once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import torch

from weft.checkpoint.convert.peft import is_adapter
from weft.checkpoint.convert.sources import checkpoint_format
from weft.checkpoint.model import open_model
from weft.checkpoint.weights import Pretrained, open_pretrained
from weft.data.tokenizer import Tokenizer, tokenizer_from_files
from weft.errors import UsageError, WeftError
from weft.layout.dims import Box, Logical, slices
from weft.memory.heap import give_heap_back
from weft.models.adapters import base_of, merged_parameters
from weft.models.shared_weights import Digests, SharedWeights, check_same_shape
from weft.models.transformer import Transformer
from weft.models.values import Values
from weft.parallel.build import connect

#: Names of files, with their sizes in bytes and the times of their last changes in nanoseconds.
Stamps = tuple[tuple[str, int, int], ...]


@dataclass
class FamilyMember:
    """One model of a family: a base model, or another model of its shape. The weights stay in files until it is opened.

    Attributes:
        ``name``: name of the model.
        ``where``: folder of the model.
        ``files``: contents of the files beside the weights, by name.
        ``digests``: hashes of the weights, by parameter; None until the model has been opened.
        ``own``: bytes of the weights that differ from those of the base model; until the model has been opened, bytes
            of all weights of the base model.
        ``stamps``: names, sizes and times of the files when the weights were last read.
    """

    name: str
    where: Path
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    digests: Digests | None = field(default=None, repr=False)
    own: int = 0
    stamps: Stamps = ()

    @property
    def digest(self) -> bytes:
        """A hash of all weights of the model, which must have been opened."""
        assert self.digests is not None
        whole = blake2b(digest_size=16)
        for name, digest in sorted(self.digests.items()):
            whole.update(name.encode() + b"\0" + digest)
        return whole.digest()


class ModelFamily:
    """Models that share memory with the opened model ``base`` for all weights of equal content.

    ``form``: form in which weights are held and multiplied: ``float``, ``int8`` or ``int4``. Adapters are merged into
    the weights, both of ``base`` and of the other models.
    """

    def __init__(self, base: Transformer, form: str = "float") -> None:
        if base.shape.kind:
            raise UsageError(
                f"a plugin's model ({base.shape.kind}) shares no weights; serve it alone"
            )
        self.shape, self.mesh = base_of(base.shape), base.mesh
        self.dtype = base.norm.scale.dtype
        self.shared = SharedWeights(form)
        self.base = self._empty()
        weights = merged_parameters(base)
        self.digests = self.shared.fill(self.base, values_in(weights))
        self.sizes = {name: weights[name].nbytes for name in self.digests}
        #: Bytes of the base model alone.
        self.nbytes = self.shared.nbytes

    def member(self, where: Path, tokenizer: Tokenizer | None) -> FamilyMember:
        """Return the model in the folder ``where`` as a member of the family, without reading its weights.

        ``tokenizer``: tokenizer of the base model. Raises :class:`UsageError` if the model's shape differs from the
        base model's, or if it has a tokenizer of its own that differs from ``tokenizer``.
        """
        pretrained = open_pretrained(where)
        if pretrained.values is None:
            raise UsageError(f"{where} is a configuration without weights")
        check_same_shape(str(where), pretrained.shape, self.shape)
        files = pretrained.files
        if tokenizer is not None and "tokenizer.json" in files:
            own = tokenizer_from_files(files, str(where))
            if own.fingerprint != tokenizer.fingerprint:
                raise UsageError(
                    f"{where} has another tokenizer than the base; serve it alone"
                )
        return FamilyMember(where.name, where, files, own=self.nbytes)

    def open(self, member: FamilyMember) -> Transformer:
        """Open ``member``, and return it as a model with weights.

        When a member is opened for the first time, all its weights are read and hashed. Later, only weights are read
        that no open model of the family has in memory. Raises :class:`WeftError` if a weight has changed since the
        first time.
        """
        stamps, known = stamps_of(member.where), member.digests
        unchanged = known is not None and stamps == member.stamps
        # its files are mapped into memory until it is dropped
        pretrained = open_pretrained(member.where)
        living = {} if known is None else self.shared.living(known)
        model = self._empty(living)
        try:
            values = self._values(member.where, pretrained)
            fill = self.shared.fill
            member.digests = fill(model, values, known, living, unchanged)
        except WeftError as error:
            raise WeftError(f"{member.where}: {error}") from None
        member.stamps = stamps
        if known is None:  # all weights were read, and most were not kept
            give_heap_back()
        # weights in fewer bits are smaller than those that are read
        share = self.nbytes / sum(self.sizes.values())
        apart = [n for n, d in member.digests.items() if d != self.digests[n]]
        member.own = round(share * sum(self.sizes[name] for name in apart))
        return model

    def _values(self, where: Path, pretrained: Pretrained) -> Values:
        if pretrained.values is None or pretrained.shape.adapter is not None:
            model = open_model(where, str(self.mesh.device), lambda line: None).model
            return values_in(merged_parameters(model))
        values, dtype = pretrained.values, self.dtype

        def own(name: str, logical: Logical, box: Box) -> torch.Tensor:
            read = values(name, logical, box)
            # a tensor of a file keeps the whole file in memory
            return read.clone() if read.dtype == dtype else read

        return own

    def _empty(self, without: Collection[str] = ()) -> Transformer:
        """Return a model of the family's shape without memory for weights, and without the blocks ``without``."""
        layers = [i for i in range(self.shape.layers) if f"blocks.{i}" not in without]
        model = Transformer(self.shape, self.mesh, layers=layers)
        connect(model, self.mesh, "none")
        model.to(self.dtype)
        model.freq = model.freq.to(self.mesh.device)
        return model


def stamps_of(folder: Path) -> Stamps:
    """Return the name, size and time of last change of every file in ``folder``. A changed file changes the result."""
    files = ((file, file.stat()) for file in sorted(folder.rglob("*")))
    return tuple((str(file), stat.st_size, stat.st_mtime_ns) for file, stat in files)


def values_in(weights: Mapping[str, torch.Tensor]) -> Values:
    """Return a function that reads the values of a parameter's box from ``weights``.

    ``weights``: whole parameters, by name.
    """

    def values(name: str, logical: Logical, box: Box) -> torch.Tensor:
        return weights[name][slices(box)]

    return values


def model_folders(folder: Path, warn: Callable[[str], None]) -> list[Path]:
    """Return the folders directly in ``folder`` that hold models, in order of their names.

    ``warn``: called with a line of text for each other folder. Raises :class:`UsageError` if no folder holds a model.
    """
    if not folder.is_dir():
        raise UsageError(f"--models {folder} is no folder")
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    models = [path for path in folders if is_adapter(path) or checkpoint_format(path)]
    if not models:
        raise UsageError(f"--models {folder} has no folder with a model")
    for path in folders:
        if path not in models:
            warn(f"{path} holds no model, and is left out")
    return models
