"""Experts of clusters of images, trained apart: one model, whose router says how much each counts in a noised image."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.diffusion.denoiser import Denoiser, open_denoiser
from weft.diffusion.noise_process import NoiseProcess
from weft.errors import UsageError, WeftError
from weft.train.expert_join import BayesRouter, joined_outputs
from weft.train.expert_set import ExpertSet, read_expert_set

if TYPE_CHECKING:
    from weft.shapes.diffusion_shape import DiffusionSettings

T = torch.Tensor

#: Function from noised images, times and conditions to what speaks for each expert, ``[batch, experts]``.
Evidence = Callable[[T, T, T], T]
#: Settings of a model on which its predictions' meaning depends, and words for them.
SHARED = {
    "size": "the size of images",
    "channels": "the number of channels",
    "classes": "the number of classes",
    "text": "the width of texts",
    "target": "what is predicted",
    "schedule": "the schedule of noise",
}


def check_joinable(
    name: str, settings: DiffusionSettings, first: str, of_first: DiffusionSettings
) -> None:
    """Raise :class:`UsageError` if the predictions of two models cannot be combined.

    ``name``, ``settings``: name and settings of one model. ``first``, ``of_first``: name and settings of the other. The
    two models may differ in patches, positions and everything inside the model.
    """
    for setting, words in SHARED.items():
        own, other = getattr(settings, setting), getattr(of_first, setting)
        if setting == "schedule" and settings.target == of_first.target == "flow":
            continue
        if own != other:
            raise UsageError(
                f"{name} has model.settings.{setting} = {_shown(own)}, and {first} {_shown(other)}: {words} must be "
                "the same for predictions to be joined; train it again as the others"
            )


def _shown(value: object) -> str:
    return str([*value]) if isinstance(value, tuple) else repr(value)


@dataclass
class JoinedDenoiser:
    """Experts combined to one denoiser, which is called like a :class:`weft.diffusion.denoiser.Denoiser`.

    Its prediction is the sum of the experts' predictions, weighted by how probable each expert's cluster is for the
    noised image. The sum is exact if the experts' predictions and these probabilities are exact. The reason: the best
    prediction is a mean over all images from which the noised image can come. This mean is the weighted sum of the
    means over clusters.

    Attributes:
        ``experts``: a denoiser for each cluster; None for one that is lost.
        ``evidence``: function that returns the logarithms of how likely each cluster is.
        ``weigher``: converts them to weights. A lost expert has the prior 0, and the weights of the others add up to 1.
        ``computed``: number of noised images that each expert has computed.
    """

    experts: tuple[Denoiser | None, ...]
    evidence: Evidence
    weigher: BayesRouter
    computed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.computed = [0] * len(self.experts)

    @property
    def first(self) -> Denoiser:
        """The first expert that is not lost."""
        return next(each for each in self.experts if each is not None)

    @property
    def settings(self) -> DiffusionSettings:
        """Settings of the first expert's model. Settings that matter to samplers are equal in all experts."""
        return self.first.settings

    @property
    def process(self) -> NoiseProcess:
        """Noise process that the experts were trained with."""
        return self.first.process

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an image: channels, frames if it is a video, height, width."""
        return self.first.shape

    def weights(self, noised: T, time: T, condition: T) -> T:
        """Return the weight of each expert for each noised image, float64 ``[batch, experts]``.

        The arguments are those of a call of a denoiser.
        """
        evidence = self.evidence(noised, time, condition).double()
        return self.weigher.log_weights(evidence).exp()

    def __call__(self, noised: T, time: T, condition: T) -> T:
        """Return the joined prediction for ``noised``, of the same shape. An expert computes images it counts in.

        The arguments are those of a :class:`weft.diffusion.denoiser.Denoiser`.
        """
        weights = self.weights(noised, time, condition)
        outputs = []
        for number, expert in enumerate(self.experts):
            output = torch.zeros_like(noised)
            rows = weights[:, number] > 0
            if expert is not None and rows.any():
                predicted = expert(noised[rows], time[rows], condition[rows])
                output = predicted.new_zeros(noised.shape)
                output[rows] = predicted
                self.computed[number] += int(rows.sum())
            outputs.append(output)
        return joined_outputs(outputs, weights)


class LostExpert(NamedTuple):
    """An expert of a set that cannot be opened. ``name``: name of the expert. ``why``: the reason, in words."""

    name: str
    why: str


def check_top(top: int, experts: int) -> None:
    """Raise :class:`UsageError` if ``top``, the number of experts for each image, is larger than the number of
    ``experts``.
    """
    if top > experts:
        raise UsageError(f"--top {top} of {experts} experts; 0 stands for all")


def open_picture_experts(
    where: str | Path, device: str = "cpu", say: Callable[[str], None] = print, ema: bool = False,
    top: int | None = None,
) -> JoinedDenoiser | None:  # fmt: skip
    """Open the experts of a set that ``weft experts --clusters`` has written; None if ``where`` is a single model.

    If an expert cannot be opened, a line says so, and the weights of the others are renormalised.

    ``device``, ``say``, ``ema``: those of :func:`weft.diffusion.denoiser.open_denoiser`. ``top``: number of experts
    that are computed for an image in a step, 0 for all; None: the number in the set's settings. Raises
    :class:`UsageError` for experts that cannot be combined, and :class:`WeftError` if none is left.
    """
    from weft.diffusion.cluster_router import open_router

    experts = read_expert_set(where, images=True)
    if experts is None:
        return None
    chosen = experts.router.top if top is None else top
    check_top(chosen, len(experts.names))
    assert experts.evidence_file is not None
    router = open_router(experts.evidence_file, device).router
    lost: list[LostExpert] = []
    opened = [
        _opened(experts, number, device, say, ema, lost)
        for number in range(len(experts.names))
    ]
    if len(lost) == len(opened):
        raise WeftError(
            f"all experts of {where} are lost ({lost[0].name}: {lost[0].why}); train one with weft experts --only"
        )
    _check_opened(experts, opened, router.settings, router.clusters)
    for each in lost:
        say(
            f"expert {each.name} of {where} is lost ({each.why}): its cluster is masked, and the weights of the "
            f"{len(opened) - len(lost)} that are left are renormalised"
        )
    prior = tuple(
        0.0 if each is None else x
        for each, x in zip(opened, experts.router.prior, strict=True)
    )
    return JoinedDenoiser(tuple(opened), router, BayesRouter(prior, chosen))


def _opened(
    experts: ExpertSet, number: int, device: str, say: Callable[[str], None], ema: bool, lost: list[LostExpert],
) -> Denoiser | None:  # fmt: skip
    """Open expert ``number``, or add to ``lost`` why it cannot be opened."""
    name, place = experts.names[number], experts.places[number]
    if not experts.router.prior[number]:
        lost.append(LostExpert(name, "joined without it by --lost"))
        return None
    try:
        return open_denoiser(place, device, say, ema)
    except UsageError:
        raise
    except WeftError as error:
        lost.append(LostExpert(name, str(error).partition(";")[0]))
        return None


def _check_opened(
    experts: ExpertSet,
    opened: Sequence[Denoiser | None],
    settings: DiffusionSettings,
    clusters: int,
) -> None:
    """Raise :class:`UsageError` for experts that do not belong to each other or to the router with ``settings``."""
    if len(opened) != clusters:
        raise UsageError(
            f"{experts.evidence_file} knows {clusters} clusters, and {experts.folder} has {len(opened)} experts; run "
            "weft experts --clusters again"
        )
    for name, expert in zip(experts.names, opened, strict=True):
        if expert is not None:
            check_joinable(f"expert {name}", expert.settings, "the router", settings)
