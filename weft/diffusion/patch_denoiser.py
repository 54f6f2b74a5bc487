"""A diffusion transformer and a sampler as sampling tables run them: token by token, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from weft.diffusion.denoiser import Denoiser
    from weft.diffusion.guidance_halves import GuidanceHalf
    from weft.diffusion.noise_process import NoiseProcess
    from weft.diffusion.sampling_run import Attend
    from weft.diffusion.solver import Solver
    from weft.models.diffusion_transformer import Signals

T = torch.Tensor


class PreparedTokens(NamedTuple):
    """Inputs that all layers share for some tokens of a sample.

    ``signals``: rotations of the tokens, and the conditioning inputs of blocks. ``places``: positions of the tokens in
    the sample.
    """

    signals: Signals
    places: T


class PatchDenoiser:
    """Diffusion transformer as a :class:`weft.diffusion.sampling_run.TokenDenoiser`, whose tokens are patches.

    Args:
        ``denoiser``: the transformer.
        ``conditions``: condition of each sample: class numbers ``[samples]``, or text states.
        ``times``: the time of each step.
        ``guidance``: scale of classifier-free guidance; 1: none. Otherwise a batch has every sample twice, with and
            without its condition.
        ``dropped``: the condition that stands for none.
        ``real``: which values of the patches belong to pixels, bool ``[patches, values]``, as
            :func:`weft.models.patches.real_values` returns it; None: all. Other values are padding and stay zero.
        ``half``: which half of guidance this rank computes; None: both.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        conditions: T,
        times: Sequence[float],
        guidance: float = 1.0,
        dropped: T | int = 0,
        real: T | None = None,
        half: GuidanceHalf | None = None,
    ) -> None:
        shape = denoiser.model.shape
        self.denoiser, self.times, self.guidance = denoiser, tuple(times), guidance
        self.layers, self.heads, self.width = shape.layers, shape.heads, shape.embed
        self.head_dim = shape.head_dim or shape.embed // shape.heads
        self.copies, self.half = 1 if guidance == 1 or half else 2, half
        without = torch.zeros_like(conditions) + dropped
        both = (conditions, without) if half is None or half.conditional else (without,)
        self.conditions = torch.cat(both[: self.copies])
        self.real = None if real is None or bool(real.all()) else real

    def own(self) -> PatchDenoiser:
        """Return a copy for another thread: new modules with the same weights in memory."""
        model = self.denoiser.model
        weights = {id(p): p for p in (*model.parameters(), *model.buffers())}
        copy = PatchDenoiser.__new__(PatchDenoiser)
        copy.__dict__.update(self.__dict__)
        copy.denoiser = deepcopy(self.denoiser, dict(weights))
        return copy

    def prepare(self, places: T, step: int) -> PreparedTokens:
        """Return the inputs that all layers share for the tokens at ``places`` ``[tokens]`` in step ``step``."""
        times = torch.full((len(self.conditions),), self.times[step], dtype=torch.float64)  # fmt: skip
        times = times.to(places.device)
        signals = self.denoiser.signals(times, self.conditions, places.tolist())
        return PreparedTokens(signals, places)

    def embed(self, latents: T, prepared: PreparedTokens) -> T:
        """Return the first layer's input for ``latents`` ``[samples, tokens, values]``.

        ``prepared``: shared inputs of these tokens, from :meth:`prepare`.
        """
        positions = self.denoiser.positions(len(latents), prepared.places.tolist())
        hidden = self.denoiser.model.embedded(latents, positions)
        return torch.cat([hidden] * self.copies)

    def layer(
        self, index: int, hidden: T, prepared: PreparedTokens, attend: Attend
    ) -> T:
        """Return the output of layer ``index`` for ``hidden``. The layer calls ``attend`` once, for its self-attention.

        ``prepared``: shared inputs of the tokens, from :meth:`prepare`.
        """

        def with_keys(_: int, q: T, k: T, v: T) -> T:
            return attend(q, k, v)

        return self.denoiser.blocks[index](hidden, prepared.signals, with_keys)

    def final(self, hidden: T, prepared: PreparedTokens) -> T:
        """Return the prediction ``[samples, tokens, values]`` from the last layer's output ``hidden``.

        Classifier-free guidance is applied. ``prepared``: shared inputs of the tokens, from :meth:`prepare`.
        """
        predicted = self.denoiser.model.ended(hidden, prepared.signals)
        pair: tuple[T, ...] = ()
        if self.half is not None:
            pair = predicted, self.half.exchanged(predicted)
            pair = pair if self.half.conditional else pair[::-1]
        elif self.copies == 2:
            pair = predicted.chunk(2)
        if pair:
            conditional, unconditional = pair
            moved = conditional - unconditional
            predicted = unconditional + self.guidance * moved
        if self.real is not None:  # beyond the image a prediction means nothing
            real = self.real.to(predicted.device)[prepared.places]
            predicted = predicted * real
        return predicted


class SolverSteps:
    """Sampler as a :class:`weft.diffusion.sampling_run.TokenSampler`: a step of the table is one evaluation of the
    model.

    ``solver``: the sampler; ``process``: the noise process; ``times``: rising, from noise to image.

    Attributes:
        ``evaluations``: the time of each evaluation.
    """

    def __init__(
        self, solver: Solver, process: NoiseProcess, times: tuple[float, ...]
    ) -> None:
        self.solver, self.process, self.times = solver, process, times
        self.evaluations = tuple(self._dry())

    def _dry(self) -> list[float]:
        nothing = torch.zeros(1, 1, dtype=torch.float64)
        solving, evaluations = self.solver(self.process, self.times, nothing), []
        query = next(solving)
        while True:
            evaluations.append(query.time)
            try:
                query = solving.send(nothing)
            except StopIteration:
                return evaluations

    def update(self, latents: T, velocity: T, step: int, memory: dict[str, Any]) -> T:
        """Return the latents to evaluate next after ``step``, or the finished latents after the last step.

        ``velocity``: the model's prediction for ``latents``. ``memory``: state of the sampler for one block, kept
        between steps.
        """
        if "solving" not in memory:
            memory["solving"] = self.solver(self.process, self.times, latents)
            next(memory["solving"])
        try:
            query = memory["solving"].send(velocity)
        except StopIteration as end:
            return end.value
        return query.noised
