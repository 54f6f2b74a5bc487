"""Open checkpoint of another program, and the files beside its weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from weft.checkpoint.convert.rules import Shard, TensorSource, logical_tensor
from weft.checkpoint.storage import Storage
from weft.errors import WeftError
from weft.models.hugging_face import files_beside, tokenizer_files
from weft.recipe import ModelShape
from weft.shapes.carried_files import CONFIG
from weft.shapes.config import shape_from_config
from weft.shapes.parameters import whole_table

#: What ranks stored of each tensor, by its name.
Stores = dict[str, Sequence[Shard]]


@dataclass
class Foreign:
    """Open checkpoint of another program, or of Weft, from which :func:`.convert` reads one tensor at a time.

    Raises :class:`WeftError` if a parameter of ``model`` has no source, or a source belongs to no parameter.

    Attributes:
        ``kind``: format of the checkpoint, such as ``hf`` or ``weft``.
        ``path``: path of the checkpoint.
        ``model``: shape of the model.
        ``sources``: source of each parameter's values, by Weft's name of the parameter.
        ``moments``: sources of the optimizer's moments, by moment (``exp_avg``) and then by parameter; empty if none is
            stored.
        ``step``: number of updates that the model has had.
        ``files``: contents of files beside the weights, such as the tokenizer's, by name.
        ``length``: number of tokens of a training sequence (``data.seq_len``), if a Weft run has trained the model from
            random weights; otherwise None.
    """

    kind: str
    path: Path | Storage
    model: ModelShape
    sources: Mapping[str, TensorSource]
    moments: Mapping[str, Mapping[str, TensorSource]] = field(default_factory=dict)
    step: int = 0
    files: Mapping[str, bytes] = field(default_factory=dict)
    length: int | None = None

    def __post_init__(self) -> None:
        self.table = whole_table(self.model)
        if missing := [name for name in self.table if name not in self.sources]:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise WeftError(f"{self.path} has nothing for {', '.join(missing[:5])}{more}; the configuration is of "
                            "another model, or a file is missing")  # fmt: skip
        ignored = {"head"} if self.model.tied else set()
        if extra := [
            source.name
            for name, source in self.sources.items()
            if name not in {*self.table, *ignored}
        ]:
            raise WeftError(f"{self.path} has tensors that the model has not: {', '.join(extra[:5])}; the "
                            "configuration is of another model")  # fmt: skip

    def read(
        self, name: str, dtype: torch.dtype | None = None, moment: str = ""
    ) -> torch.Tensor:
        """Read the whole parameter ``name``, or one of its optimizer moments if ``moment`` names that moment.

        ``dtype``: the type to convert the values to; None keeps the stored type.
        """
        sources = self.moments[moment] if moment else self.sources
        try:
            return logical_tensor(
                sources[name], self.table[name].shape, self.model, dtype
            )
        except WeftError as error:
            raise naming(self.path, error) from None


def naming(path: object, error: WeftError) -> WeftError:
    """Return an error whose message names ``path``.

    It is ``error`` itself if its message contains the path already. Otherwise it is a new :class:`WeftError` whose
    message begins with the path.
    """
    return error if str(path) in str(error) else WeftError(f"{path}: {error}")


def _config(path: Path, config: Path | None) -> Path:
    """Return the path of the ``config.json`` of the model at ``path``."""
    folders = [path, path.parent] if path.is_dir() else [path.parent]
    file = config or next(
        (f / "config.json" for f in folders if (f / "config.json").is_file()), None
    )
    if file is None:
        raise WeftError(
            f"{path} has no config.json that says which model it is of; give one with --config"
        )
    return file


def shape_beside(path: Path, config: Path | None) -> ModelShape:
    """Read the shape of the model at ``path`` from the ``config.json`` in that folder or in the folder above it.

    ``config``: path of the ``config.json``, if it is elsewhere; None: it is in these folders. Raises :class:`WeftError`
    if there is no such file.
    """
    return shape_from_config(_config(path, config))


def model_files(path: Path, config: Path | None) -> dict[str, bytes]:
    """Read the files beside the weights at ``path``, such as the tokenizer's, and return their contents by name.

    ``config``: the model's ``config.json``, if it lies elsewhere.
    """
    file = _config(path, config)
    file = file / CONFIG if file.is_dir() else file
    return files_beside(file) | (tokenizer_files(path) if path.is_dir() else {})
