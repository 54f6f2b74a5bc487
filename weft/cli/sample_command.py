"""``weft sample``: images or videos from a diffusion transformer, on one device or on several."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.arguments import Ema, ModelName, Seed, Spread
from weft.cli.console import warn
from weft.errors import UsageError

_class = "Names or numbers of the samples' classes, used in turn; none: no class; if not given: all classes in turn."
_prompt = "What the samples are to show, for a model that reads texts; several are taken in turn."
_guidance = "Scale of classifier-free guidance; 1: none."
_stale = (
    "With --layout: how many steps old the keys of other ranks may be. 0: fresh, equal to one device; 1: transfers run "
    "beside the computation."
)
_table = (
    "Sample by this table, with settings after a colon: distrifusion, pcpp:part=0.5, pipefusion:patches=8, "
    "video-infinity, dualparal:context=5, asgdiffusion:scale=2, exact."
)
_split = "With --guidance: predictions with and without condition on two groups of ranks, each of the size of --layout."
_frames = "Frames of a video; if not given: as many as the model was trained on."
_top = (
    "For a set of experts: number of the likeliest experts that count in each image at each step; 0: all. If "
    "not set: as in training."
)
_autoencoder = "Folder of the autoencoder whose latents the model makes; if not given: where it was in training."
_size = "Height and width of the images, for a model that has learned several sizes; if not given: the largest."
_svg = "Draw the table that is run, simulated with layers that all take equally long."


def sample_command(
    checkpoint: Annotated[str, ModelName],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for the images.")
    ] = Path("samples"),
    count: Annotated[int, typer.Option(min=1, help="Number of samples.")] = 16,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 20,
    sampler: Annotated[
        str, typer.Option(metavar="NAME", help="The sampler.")
    ] = "euler",
    guidance: Annotated[float, typer.Option(min=0, help=_guidance)] = 1.0,
    classes: Annotated[
        str, typer.Option("--class", metavar="NAME,...", help=_class)
    ] = "",
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help=_prompt)
    ] = None,
    seed: Seed = 0,
    batch: Annotated[
        int, typer.Option(min=1, help="Largest number of samples in one evaluation.")
    ] = 64,
    ema: Ema = False,
    layout: Spread = None,
    stale: Annotated[int | None, typer.Option(metavar="STEPS", help=_stale)] = None,
    table: Annotated[str, typer.Option(metavar="NAME", help=_table)] = "",
    split: Annotated[bool, typer.Option("--split-guidance", help=_split)] = False,
    frames: Annotated[int, typer.Option(min=0, help=_frames)] = 0,
    size: Annotated[str, typer.Option(metavar="H,W", help=_size)] = "",
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help=_svg)] = None,
    top: Annotated[int | None, typer.Option(min=0, metavar="K", help=_top)] = None,
    autoencoder: Annotated[str, typer.Option(metavar="FOLDER", help=_autoencoder)] = "",
) -> int:
    """Make images or videos with a diffusion transformer that a run has trained, and write them into a folder."""
    import torch

    from weft.cli.data import whole_numbers
    from weft.diffusion.denoiser import open_denoiser
    from weft.diffusion.parallel_sample import (
        TableSampling,
        asked_conditions,
        table_of_options,
    )
    from weft.diffusion.picture_engine import check_guidance
    from weft.diffusion.sample import SampleRequest
    from weft.diffusion.sampling_pictures import draw_table, write_samples
    from weft.diffusion.sampling_start import in_sampling_rank, launch_sampling
    from weft.layout.layout import Layout
    from weft.new_folder import check_new
    from weft.train.expert_set import read_expert_set, refuse_beside_experts
    from weft.writable import check_writable

    spread = Layout.parse(layout or "")
    sides = whole_numbers("--size", size)
    named = table_of_options(spread, stale, table)
    ranks = named.ranks * (1 + split)
    if svg is not None:
        check_writable(svg, "--svg")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check_new(out)
    if read_expert_set(checkpoint, images=True) is not None:
        from weft.diffusion.joined_sample import write_joined_samples

        refuse_beside_experts(checkpoint, {
            "--layout": spread.world > 1, "--stale": stale is not None, "--table": table, "--frames": frames,
            "--svg": svg, "--split-guidance": split, "--prompt": prompt,
            "--autoencoder": autoencoder, "--size": size,
        })  # fmt: skip
        no_class = torch.zeros(count, dtype=torch.int64, device=device)
        request = SampleRequest(no_class, steps, sampler, guidance, seed, 0, batch)
        said = write_joined_samples(checkpoint, out, request, classes, warn, ema, top)
        print(f"weft: {said}; all of them: {out / 'grid.png'}", file=sys.stderr)
        return 0
    if top is not None:
        raise UsageError(
            f"--top is for sets of experts, and {checkpoint} is a single model; leave it out"
        )
    if (code := launch_sampling(ranks)) is not None:
        return code
    with in_sampling_rank(ranks, device) as own:
        denoiser = open_denoiser(checkpoint, own, warn, ema, autoencoder)
        denoiser = denoiser.sized(sides) if sides else denoiser
        if denoiser.learned and denoiser.pixel_size not in denoiser.learned:
            known = ", ".join(
                f"{size.height},{size.width}" for size in denoiser.learned
            )
            warn(f"--size {size}: the model has learned {known}, and not this size")
        conditions = asked_conditions(
            denoiser.settings, count, classes, denoiser.class_names, prompt or ()
        )
        check_guidance(denoiser, guidance)
        request = SampleRequest(
            conditions.to(own), steps, sampler, guidance, seed, 0, batch
        )
        sampling = TableSampling(
            denoiser, request, named, frames, denoiser.settings.classes, split
        )
        begun = time.perf_counter()
        images = sampling.over_ranks()
        if images is None:
            return 0
        seconds = time.perf_counter() - begun
        write_samples(denoiser.pixels(images), out)
        if svg is not None:
            draw_table(sampling, svg)
        spent = (
            f" by {named.word} on {ranks} ranks, of which the first sent {sampling.bytes_sent:,} bytes"
            if ranks > 1
            else ""
        )
        print(
            f"weft: {count} samples in {seconds:.2f} s{spent}; all of them: {out / 'grid.png'}",
            file=sys.stderr,
        )
    return 0
