"""Options for a model whose weights rest in files while it generates, and what they build."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.memory.resting_experts import RestingExperts
from weft.memory.resting_layers import Resting, RestingLayers
from weft.memory.resting_neurons import RestingNeurons
from weft.models.products import NARROW
from weft.models.transformer import Transformer
from weft.models.values import Values


@dataclass(frozen=True, kw_only=True)
class RestingWeights:
    """Options of all commands that generate, which say where layers and neurons rest meanwhile.

    Attributes:
        ``layers_in``: folder of the file with the layers; None: layers stay in memory.
        ``window``: number of layers that have room in memory.
        ``least_rate``: tokens per second that a text needs; None: no limit.
        ``neurons_in``: folder of the file with the feed-forwards' neurons; None: neurons stay in memory.
        ``neurons``: share of the feed-forwards' weights that has room in memory; None: half.
        ``predictor``: file of the predictor of active neurons; None: the gates say which neurons are active.
    """

    layers_in: str | None = None
    window: int | None = None
    least_rate: float | None = None
    neurons_in: str | None = None
    neurons: float | None = None
    predictor: str | None = None


@dataclass(frozen=True, kw_only=True)
class WeightsElsewhere(RestingWeights):
    """Options that say where weights rest while a model generates.

    Attributes:
        ``experts_in``: folder of the file with the experts, or ``host`` for the host's memory; None: experts stay on
            the device.
        ``resident``: share of the experts that have room in memory; None: half.
    """

    experts_in: str | None = None
    resident: float | None = None

    def check(
        self, weights: str, spread: Layout, device: str = "", beside: Mapping[str, object] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Raise :class:`UsageError` for options that conflict. ``weights``: type of the weights; ``spread``: the
        layout; ``device``: where the model is, "cpu" or "cuda"; ``beside``: values of other options, by name, that
        exclude layers in a file.
        """
        self._check_experts(spread, device)
        if (self.layers_in is None) != (self.window is None):
            raise UsageError(
                "--layers-in FOLDER says where layers rest, and --window N how many have room in memory; give both, or "
                "neither"
            )
        for option, value, of in (
            ("--least-rate", self.least_rate, ("--layers-in", self.layers_in)),
            ("--neurons", self.neurons, ("--neurons-in", self.neurons_in)),
            ("--predictor", self.predictor, ("--neurons-in", self.neurons_in)),
        ):
            if value is not None and of[1] is None:
                raise UsageError(f"{option} is for {of[0]} FOLDER; give both, or leave it out")  # fmt: skip
        for option, folder in (("--layers-in", self.layers_in), ("--neurons-in", self.neurons_in)):  # fmt: skip
            if folder is not None:
                _check_folder(option, folder)
                self._check_beside(option, weights, spread, beside)

    @staticmethod
    def _check_beside(
        option: str, weights: str, spread: Layout, beside: Mapping[str, object]
    ) -> None:
        """Raise :class:`UsageError` for what does not go with weights that rest where ``option`` says."""
        if weights not in ("float", NARROW):
            raise UsageError(
                f"{option} is for weights in floating point, not in {weights}; leave out one of them"
            )
        if spread.ep > 1:
            raise UsageError(
                f"{option} is for ranks that have all experts of their layers; leave it out, or ep in --layout"
            )
        if spread.overlap:
            raise UsageError(
                f"{option} is for layers that compute all tokens at once; leave it out, or overlap in --layout"
            )
        for other, given in beside.items():
            if given:
                raise UsageError(
                    f"{option} is for one model, whose weights are in one process; leave out {other}"
                )

    def _check_experts(self, spread: Layout, device: str) -> None:
        if self.experts_in is None:
            if self.resident is not None:
                raise UsageError(
                    "--resident is for --experts-in, without which memory holds all experts"
                )
            return
        _check_folder("--experts-in", self.experts_in)
        if spread.world > spread.cp or spread.ep > 1:
            raise UsageError(
                "--experts-in is for ranks that have all experts; leave it out, or have cp alone in --layout"
            )
        if self.experts_in == "host" and device == "cpu":
            raise UsageError(
                "--experts-in host is for models on a GPU; on the CPU give a folder on a local disk"
            )

    def parts(self, weights: str) -> list[Resting]:
        """Return one object for each part of the weights that is to rest elsewhere: experts, neurons, layers.
        ``weights``: type in which weights are used.
        """
        parts = list[Resting]()
        if self.experts_in is not None:
            where = None if self.experts_in == "host" else Path(self.experts_in)
            share = 0.5 if self.resident is None else self.resident
            parts.append(RestingExperts(where, share))
        if self.neurons_in is not None:
            share = 0.5 if self.neurons is None else self.neurons
            predictor = None if self.predictor is None else Path(self.predictor)
            parts.append(RestingNeurons(Path(self.neurons_in), share, predictor))
        if self.layers_in is not None:
            assert self.window is not None
            dtype = torch.bfloat16 if weights == NARROW else torch.float32
            parts.append(
                RestingLayers(
                    Path(self.layers_in), self.window, self.least_rate or 0, dtype
                )
            )
        return parts


def _check_folder(option: str, folder: str) -> None:
    """Raise :class:`UsageError` if ``folder`` cannot be one of this computer."""
    if not folder:
        raise UsageError(f"{option} is empty; give a folder on a local disk")
    if "://" in folder:
        raise UsageError(f"{option} {folder} is no folder of this computer; give one on a local disk")  # fmt: skip


def lift_of(parts: Sequence[Resting]) -> Callable[..., None] | None:
    """Return a function that moves the weights of all ``parts`` out of a model when it is opened; None if there are no
    parts. The function is called with the model, whose parameters have no values yet, and a function that reads the
    values of a parameter.
    """

    def lift(model: Transformer, values: Values) -> None:
        for part in parts:
            part.lift(model, values)

    return lift if parts else None


def tell_about(parts: Sequence[Resting], warn: Callable[[str], None]) -> None:
    """Print the lines that ``parts`` have about their files and disks with ``warn``, after the model was opened."""
    for part in parts:
        for line in part.lines:
            warn(line)
