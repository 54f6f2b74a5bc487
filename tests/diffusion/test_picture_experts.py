"""Experts of clusters are one model: exactly, where experts and router are; lost ones are masked; others refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.diffusion.cluster_router import (
    ClusterRouter,
    RouterScores,
    TrainedClusterRouter,
    write_router,
)
from weft.diffusion.noise_process import NoiseProcess
from weft.diffusion.picture_experts import (
    JoinedDenoiser,
    check_joinable,
    open_picture_experts,
)
from weft.diffusion.sample import SampleRequest, sample
from weft.errors import UsageError, WeftError
from weft.shapes.diffusion_shape import DiffusionSettings
from weft.train.expert_join import BayesRouter
from weft.train.expert_set import FILE, read_expert_set, write_expert_set

T = torch.Tensor
TARGETS = ("flow", "epsilon", "v", "x")
IMAGES, SHAPE = 40, (1, 3, 4)
#: The images' clusters, of unequal size.
CLUSTERS = torch.tensor([0] * 23 + [1] * 12 + [2] * 5)


def images() -> T:
    """Images in three heaps that overlap, ``[images, *shape]``."""
    random = torch.Generator().manual_seed(3)
    heaps = torch.randn(3, *SHAPE, generator=random, dtype=torch.float64)
    spread = torch.randn(IMAGES, *SHAPE, generator=random, dtype=torch.float64)
    return 0.6 * heaps[CLUSTERS] + 0.3 * spread


class Exact:
    """The best prediction if some images are all there are: a mean over those that a noised one can stem from."""

    def __init__(self, target: str, some: T, variance: float = 0.0) -> None:
        self.process, self.images, self.variance = NoiseProcess(target), some, variance
        self.shape, self.settings = SHAPE, None

    def logs(self, noised: T, time: T) -> T:
        """Of each image, how dense its noised images are at ``noised``, in logarithms ``[batch, images]``."""
        signal, noise = (x[:, None] for x in self.process.amounts(time))
        whole = (signal**2 * self.variance + noise**2)[..., None]
        apart = noised.flatten(1)[:, None] - signal[..., None] * self.images.flatten(1)
        logs = -apart.square() / (2 * whole) - (2 * math.pi * whole).log() / 2
        return logs.sum(-1)

    def __call__(self, noised: T, time: T, condition: T) -> T:
        """With a variance, each image is the middle of a Gaussian of images."""
        signal, noise = (x.view(-1, 1, 1, 1, 1) for x in self.process.amounts(time))
        shrink = signal * self.variance / (signal**2 * self.variance + noise**2)
        of_each = self.images + shrink * (noised[:, None] - signal * self.images)
        shares = self.logs(noised, time).softmax(-1)
        image = (shares.view(*shares.shape, 1, 1, 1) * of_each).sum(1)
        of_noise = (noised - signal[:, 0] * image) / noise[:, 0]
        return self.process.target_of(image, of_noise, time)


def joined(target: str, variance: float, lost: int | None = None, top: int = 0) -> Any:
    """Exact experts of the clusters, and the exact router."""
    parts = [Exact(target, images()[CLUSTERS.eq(k)], variance) for k in range(3)]

    def evidence(noised: T, time: T, condition: T) -> T:
        # a cluster's share of the images is in the sum over them
        return torch.stack([e.logs(noised, time).logsumexp(-1) for e in parts], -1)

    experts: Any = tuple(None if k == lost else part for k, part in enumerate(parts))
    prior = tuple(0.0 if k == lost else 1.0 for k in range(3))
    return JoinedDenoiser(experts, evidence, BayesRouter(prior, top))


def noised_images(target: str) -> tuple[T, T, T]:
    random = torch.Generator().manual_seed(4)
    time = torch.linspace(0.02, 0.97, IMAGES, dtype=torch.float64)
    noise = torch.randn(IMAGES, *SHAPE, generator=random, dtype=torch.float64)
    noised = NoiseProcess(target).noised(images(), noise, time)
    return noised, time, torch.zeros(IMAGES, dtype=torch.long)


@pytest.mark.parametrize("variance", [0.0, 0.05])
@pytest.mark.parametrize("target", TARGETS)
def test_exact_experts_and_router_are_the_exact_whole(
    target: str, variance: float
) -> None:
    asked = noised_images(target)
    whole = Exact(target, images(), variance)(*asked)
    together = joined(target, variance)
    weights = together.weights(*asked)
    assert 0.1 < float((weights.max(-1).values < 0.99).double().mean()) < 0.9
    assert (together(*asked) - whole).abs().max() <= 1e-12 * whole.abs().max()
    # some weights are nothing in float64
    assert all(IMAGES / 2 < rows <= IMAGES for rows in together.computed)


@pytest.mark.parametrize("target", ["flow", "v"])
def test_without_a_lost_expert_it_is_the_exact_whole_of_what_is_left(
    target: str,
) -> None:
    asked = noised_images(target)
    left = Exact(target, images()[CLUSTERS != 1], 0.05)(*asked)
    together = joined(target, 0.05, lost=1)
    assert (together(*asked) - left).abs().max() <= 1e-12 * left.abs().max()
    assert together.computed[1] == 0 < together.computed[0]
    assert torch.equal(together.weights(*asked)[:, 1], torch.zeros(IMAGES).double())
    # also where more may count than are left
    assert torch.equal(joined("flow", 0.05, 1, top=3)(*asked), joined("flow", 0.05, 1)(*asked))  # fmt: skip


def test_the_likeliest_experts_alone_compute() -> None:
    asked = noised_images("flow")
    full = joined("flow", 0.05)
    likeliest = full.weights(*asked).argmax(-1)
    together = joined("flow", 0.05, top=1)
    predicted = together(*asked)
    assert sum(together.computed) == IMAGES
    for row, expert in enumerate(likeliest.tolist()):
        own = full.experts[expert](*(x[row : row + 1] for x in asked))
        torch.testing.assert_close(predicted[row : row + 1], own, rtol=0, atol=1e-12)
    two = joined("flow", 0.05, top=2)
    two(*asked)
    assert IMAGES < sum(two.computed) <= 2 * IMAGES
    # near the image one expert knows all, and the others' say is nothing
    late = asked[1] > 0.8
    assert (predicted - full(*asked))[late].abs().max() < 1e-3


def test_samplers_take_experts_as_they_take_a_model() -> None:
    request = SampleRequest(torch.zeros(6, dtype=torch.long), 5)
    whole = Exact("flow", images().float())

    def double(predict: Any) -> Any:
        return lambda x, time, c: predict(x.double(), time, c).float()

    alone = sample(double(whole), whole.process, SHAPE, request)
    together = sample(double(joined("flow", 0.0)), whole.process, SHAPE, request)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_predictions_that_mean_something_else_are_refused() -> None:
    first = DiffusionSettings(size=(5, 6), channels=1, classes=2)
    check_joinable("b", first.model_copy(update={"patch": 1}), "a", first)
    check_joinable("b", first.model_copy(update={"schedule": "linear"}), "a", first)
    for change in (
        {"target": "v"}, {"size": (5, 5)}, {"channels": 3}, {"classes": 4}, {"text": 7},
    ):  # fmt: skip
        (name,) = change
        with pytest.raises(UsageError, match=f"b has model.settings.{name} = "):
            check_joinable("b", first.model_copy(update=change), "a", first)
    noisy = first.model_copy(update={"target": "v"})
    with pytest.raises(UsageError, match="schedule of noise"):
        check_joinable("b", noisy.model_copy(update={"schedule": "linear"}), "a", noisy)


def test_a_set_of_images_says_which_command_it_is_for(tmp_path: Path) -> None:
    write_expert_set(tmp_path, ["a", "b"], [1, 1], 0, "router.safetensors")
    with pytest.raises(UsageError, match="weft sample --checkpoint"):
        read_expert_set(tmp_path)
    assert read_expert_set(tmp_path, images=True) is not None
    write_expert_set(tmp_path, ["a", "b"], [1, 1], 0)
    with pytest.raises(UsageError, match="weft generate --from"):
        open_picture_experts(tmp_path)
    (tmp_path / FILE).unlink()
    assert open_picture_experts(tmp_path) is None


def test_what_is_wrong_with_a_set_is_one_line(tmp_path: Path) -> None:
    write_expert_set(tmp_path, ["a", "b"], [1, 1], 0, "router.safetensors")
    for content in (None, b"no tensors", b"\0" * 64):
        if content is not None:
            (tmp_path / "router.safetensors").write_bytes(content)
        with pytest.raises(WeftError, match="is no router of images") as error:
            open_picture_experts(tmp_path)
        assert "\n" not in str(error.value)
    settings = DiffusionSettings(size=(5, 6), channels=1, classes=2)
    router = TrainedClusterRouter(
        ClusterRouter(settings, 3), RouterScores(0.5, 0.5, 0.7, 9)
    )
    write_router(tmp_path / "router.safetensors", router, "")
    with pytest.raises(UsageError, match="--top 3 of 2 experts"):
        open_picture_experts(tmp_path, top=3)
    with pytest.raises(WeftError, match=r"all experts of .* are lost .a: .* does not exist"):  # fmt: skip
        open_picture_experts(tmp_path)
    names = json.loads((tmp_path / FILE).read_text())
    assert names["router"] == "router.safetensors"
