"""Compares diffusion models with diffusers: block, loss and samplers. python bench/diffusers_peer.py [OUT]

Needs diffusers beside Weft (pip install diffusers); tests/diffusion/test_diffusers.py reads what it writes.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from weft.diffusion.denoiser import Denoiser
from weft.diffusion.noise_process import NoiseProcess
from weft.diffusion.sample import SampleRequest, sample, seeded_noise
from weft.layout.mesh import Mesh
from weft.models.autoencoder_files import open_autoencoder, save_autoencoder
from weft.models.diffusers_weights import (
    diffusers_config,
    from_diffusers,
    shape_of_diffusers,
    to_diffusers,
)
from weft.parallel.build import parallelize
from weft.recipe import Train

try:
    import diffusers
    from diffusers import (
        AutoencoderKL,
        DDPMScheduler,
        DiTTransformer2DModel,
        DPMSolverMultistepScheduler,
        FlowMatchEulerDiscreteScheduler,
        FlowMatchHeunDiscreteScheduler,
        PixArtTransformer2DModel,
        UniPCMultistepScheduler,
    )
except ImportError:
    diffusers = None

T = torch.Tensor
SHAPE = (1, 4, 4)
STEPS = 8


def prediction(noised: T, level: T) -> T:
    """A smooth function in place of a trained model. ``level``: number of the level, ``[batch]``."""
    return 0.5 * noised + 0.3 * (noised + level.view(-1, 1, 1, 1).to(noised.dtype) / 1000).sin()  # fmt: skip


def block() -> dict[str, float]:
    """Differences of the whole model, and of its gradients, from diffusers' own with the same weights."""
    torch.manual_seed(0)
    config = {
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 3, "out_channels": 6, "num_layers": 2,
        "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 5, "norm_elementwise_affine": False,
        "norm_type": "ada_norm_zero", "activation_fn": "gelu-approximate", "attention_bias": True,
    }  # fmt: skip
    peer = DiTTransformer2DModel(**config).eval().double()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
            if ".emb." in name and "blocks.0" not in name:  # all blocks share one
                layer = name.split(".")[1]
                other = name.replace(f"blocks.{layer}", "blocks.0")
                parameter.copy_(peer.get_parameter(other))
    shape = shape_of_diffusers({"_class_name": "DiTTransformer2DModel", **peer.config})
    values = from_diffusers(shape, dict(peer.named_parameters()))

    def exact(name: str, logical: Any, box: Any) -> T:
        return values(name, logical, box)

    peer.float()
    model = parallelize(shape, Mesh.single(), Train(), exact).model
    denoiser = Denoiser(model)  # type: ignore[arg-type]
    # the angles of high levels are rounded in diffusers, which makes them in float32
    x, level = torch.randn(3, 3, 8, 8), torch.tensor([0, 3, 17])
    classes = torch.tensor([0, 4, 5])
    theirs = peer(x, level, classes).sample[:, :3]
    ours = denoiser(x, 1 - (level.double() + 1) / 1000, classes)
    theirs.square().mean().backward()
    ours.square().mean().backward()
    gradients = dict(
        to_diffusers(shape, {n: p.grad for n, p in model.named_parameters()})
    )  # type: ignore[misc]
    # that of keys' biases is rounding alone
    largest = max(float(p.grad.abs().max()) for p in peer.parameters() if p.grad is not None)  # fmt: skip
    worst = 0.0
    for name, parameter in peer.named_parameters():
        if ".emb." not in name:  # which the blocks share
            theirs_of, ours_of = parameter.grad.double(), gradients[name].double()
            scale = theirs_of.abs().max().clamp(min=largest / 1000)
            worst = max(worst, float((ours_of - theirs_of).abs().max() / scale))
    difference = (theirs - ours).detach().abs().max()
    return {
        "output": float(difference), "largest": float(theirs.detach().abs().max()), "gradient": worst,
    }  # fmt: skip


def texts() -> dict[str, float]:
    """Differences of a PixArt, with cross-attention to texts, and of its gradients, in and out."""
    torch.manual_seed(0)
    config = {
        "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 3, "out_channels": 6, "num_layers": 2,
        "sample_size": 8, "patch_size": 2, "cross_attention_dim": 16, "caption_channels": 10,
    }  # fmt: skip
    peer = PixArtTransformer2DModel(**config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    shape = shape_of_diffusers({"_class_name": type(peer).__name__, **peer.config})
    values = from_diffusers(shape, dict(peer.named_parameters()))
    model: Any = parallelize(shape, Mesh.single(), Train(), values).model
    x, level, states = torch.randn(3, 3, 8, 8), torch.tensor([0, 3, 17]), torch.randn(3, 5, 10)  # fmt: skip
    theirs = peer(x, states, timestep=level).sample[:, :3]
    ours = Denoiser(model)(x, 1 - (level.double() + 1) / 1000, states)
    theirs.square().mean().backward()
    ours.square().mean().backward()
    gradients = dict(to_diffusers(shape, {n: p.grad for n, p in model.named_parameters()}))  # fmt: skip
    largest = max(float(p.grad.abs().max()) for p in peer.parameters())
    worst = 0.0
    for name, parameter in peer.named_parameters():
        scale = parameter.grad.abs().max().clamp(min=largest / 1000)
        worst = max(worst, float((gradients[name] - parameter.grad).abs().max() / scale))  # fmt: skip
    back = PixArtTransformer2DModel.from_config(diffusers_config(shape)).eval()
    back.load_state_dict(dict(to_diffusers(shape, dict(model.named_parameters()))), strict=False)  # fmt: skip
    again = back(x, states, timestep=level).sample[:, :3]
    return {
        "output": float((theirs - ours).detach().abs().max()), "largest": float(theirs.detach().abs().max()),
        "gradient": worst, "back": float((theirs - again).detach().abs().max()),
    }  # fmt: skip


def losses() -> dict[str, float]:
    """Differences of noised images and targets from those of diffusers' schedulers."""
    image, noise = torch.randn(4, *SHAPE), torch.randn(4, *SHAPE)
    level = torch.tensor([0, 250, 700, 999])
    differences = {}
    for schedule, name in (("linear", "linear"), ("cosine", "squaredcos_cap_v2")):
        betas = {"beta_start": 1e-4} if schedule == "linear" else {}
        peer = DDPMScheduler(1000, beta_schedule=name, **betas)
        time = 1 - (level.double() + 1) / 1000
        process = NoiseProcess("v", schedule)
        noised = peer.add_noise(image, noise, level) - process.noised(image, noise, time)  # fmt: skip
        velocity = peer.get_velocity(image, noise, level) - process.target_of(image, noise, time)  # fmt: skip
        differences[f"{schedule} noised"] = float(noised.abs().max())
        differences[f"{schedule} v"] = float(velocity.abs().max())
    flow = FlowMatchEulerDiscreteScheduler()
    sigma = flow.sigmas[[10, 300, 800, 999]]
    noised = flow.scale_noise(image, flow.timesteps[[10, 300, 800, 999]], noise)
    ours = NoiseProcess().noised(image, noise, 1 - sigma.double())
    differences["flow noised"] = float((noised - ours).abs().max())
    return differences


def walked(peer: Any, noise: T, flow: bool) -> T:
    """Return what diffusers' scheduler makes of ``noise`` with the smooth function as model."""
    x = noise * peer.init_noise_sigma if not flow else noise
    for level in peer.timesteps:
        scaled = x if flow else peer.scale_model_input(x, level)
        predicted = prediction(scaled, level[None].expand(len(x)))
        # their flows go from image to noise
        x = peer.step(-predicted if flow else predicted, level, x, return_dict=False)[0]
    return x


def samplers() -> dict[str, Any]:
    """Images of diffusers' schedulers, and differences of those of Weft's samplers."""
    noise = torch.stack([seeded_noise(SHAPE, 3, i) for i in range(2)])
    results: dict[str, Any] = {}
    table: dict[str, Any] = {"beta_start": 1e-4, "timestep_spacing": "linspace"}
    peers = {
        "dpm-solver": (DPMSolverMultistepScheduler, {}), "unipc": (UniPCMultistepScheduler, {}),
    }  # fmt: skip
    for target, schedule in (("epsilon", "linear"), ("v", "cosine"), ("x", "cosine")):
        predicts = {"epsilon": "epsilon", "v": "v_prediction", "x": "sample"}[target]
        name = {"linear": "linear", "cosine": "squaredcos_cap_v2"}[schedule]
        for sampler, (kind, more) in peers.items():
            peer = kind(
                1000, beta_schedule=name, prediction_type=predicts, final_sigmas_type="zero", **table, **more
            )  # fmt: skip
            peer.set_timesteps(STEPS)
            process = NoiseProcess(target, schedule)
            images = walked(peer, noise, False)
            _compare(results, f"{sampler} {target}", images, process, sampler)
    flows = {"euler": FlowMatchEulerDiscreteScheduler, "heun": FlowMatchHeunDiscreteScheduler}  # fmt: skip
    for sampler, kind in flows.items():
        peer = kind()
        # evenly spaced from noise on, as here; theirs leave out noise without any image
        sigmas = torch.linspace(1, 0, STEPS + 1)
        if sampler == "euler":
            peer.set_timesteps(sigmas=sigmas[:-1].tolist())
        else:
            peer.set_timesteps(STEPS)
            twice = torch.cat([sigmas[:1], sigmas[1:-1].repeat_interleave(2), sigmas[-1:]])  # fmt: skip
            peer.sigmas, peer.timesteps = twice, twice[:-1] * 1000
        images = walked(peer, noise, True)
        _compare(results, f"{sampler} flow", images, NoiseProcess(), sampler)
    return results


def _compare(
    results: dict[str, Any], name: str, theirs: T, process: NoiseProcess, sampler: str
) -> None:
    request = SampleRequest(torch.zeros(2, dtype=torch.int64), STEPS, sampler, seed=3)

    def predict(noised: T, time: T, condition: T) -> T:
        level = 1000 * (1 - time) - int(process.target != "flow")
        return prediction(noised, level)

    ours = sample(predict, process, SHAPE, request)
    results[name] = {
        "difference": float((theirs - ours).abs().max()), "largest": float(theirs.abs().max()),
        "image": [round(float(v), 7) for v in theirs[0].flatten()],
    }  # fmt: skip


def autoencoder() -> dict[str, float]:
    """Differences of latents, pixels and gradients of an autoencoder, and of one that diffusers reads back."""
    torch.manual_seed(0)
    widths = (8, 16, 16)
    peer = AutoencoderKL(
        3, 3, ("DownEncoderBlock2D",) * 3, ("UpDecoderBlock2D",) * 3, widths, 2, latent_channels=3, norm_num_groups=4,
        shift_factor=0.2,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    with TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        ours = open_autoencoder(folder).requires_grad_(True)
        again = save_autoencoder(ours, Path(folder) / "again")
        back = AutoencoderKL.from_pretrained(str(again))
    x = torch.randn(2, 3, 16, 12)
    scale, shift = peer.config.scaling_factor, peer.config.shift_factor
    latents = (peer.encode(x).latent_dist.mean - shift) * scale
    pixels = peer.decode(latents / scale + shift).sample
    our_latents = ours.encoded(x)
    our_pixels = ours.decoded(our_latents)
    pixels.square().mean().backward()
    our_pixels.square().mean().backward()
    theirs, grads = (dict(m.named_parameters()) for m in (peer, ours))
    largest = max(float(p.grad.abs().max()) for p in theirs.values() if p.grad is not None)  # fmt: skip
    worst = max(
        float((grads[n].grad - p.grad).abs().max()) for n, p in theirs.items() if p.grad is not None
    )  # fmt: skip
    state = back.state_dict()
    return {
        "latents": float((latents - our_latents).detach().abs().max()),
        "pixels": float((pixels - our_pixels).detach().abs().max()),
        "largest": float(pixels.detach().abs().max()), "gradient": worst / largest,
        "back": max(float((state[n] - v).abs().max()) for n, v in peer.state_dict().items()),
    }  # fmt: skip


def main(out: str = "bench/results/diffusers_peer.json") -> None:
    """Compare everything, and write the differences."""
    if diffusers is None:
        sys.exit("diffusers is not installed; pip install diffusers")
    results = {
        "diffusers": diffusers.__version__, "torch": torch.__version__, "block": block(), "texts": texts(),
        "autoencoder": autoencoder(), "loss": losses(), "samplers": samplers(),
    }  # fmt: skip
    Path(out).write_text(json.dumps(results, indent=1) + "\n")
    print(
        json.dumps(results["block"]),
        json.dumps(results["texts"]),
        json.dumps(results["autoencoder"]),
        json.dumps(results["loss"]),
    )
    for name, each in results["samplers"].items():
        print(name, each["difference"], each["largest"])


if __name__ == "__main__":
    main(*sys.argv[1:])
