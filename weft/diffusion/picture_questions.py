"""Images that a model makes during its training, scored against real ones and shown in the report."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import numpy as np
import torch

from weft.data.captions import captions_as_rows
from weft.data.tasks import Answered
from weft.diffusion.denoiser import Denoiser
from weft.diffusion.image_files import image_grid, png_bytes
from weft.diffusion.picture_scores import PictureJudge
from weft.diffusion.sample import SampleRequest, sample
from weft.train.step_loader import AskedQuestions

if TYPE_CHECKING:
    from weft.data.pictures import PictureSet
    from weft.models.diffusion_transformer import DiffusionTransformer
    from weft.train.step_loader import RunRecords

#: Images of an evaluation, steps of each, and how many of them the report shows.
COUNT, STEPS, SHOWN = 200, 10, 20
#: Most pixels of a batch of images that is evaluated at once.
MOST_PIXELS = 1 << 18


def picture_questions(
    model: DiffusionTransformer, real: PictureSet, recorder: RunRecords, every: int
) -> dict[str, AskedQuestions]:
    """Return, by name, a function that lets ``model`` sample images every ``every`` steps, and records their scores.

    The images begin with the same noise each time, and show all classes in turn, or captions of the data. ``real``: the
    images to score against. ``recorder``: gets a record of kind "pictures".
    """
    behind = None
    if real.encoder:
        from weft.models.autoencoder_files import open_autoencoder

        # now, as its folder may be moved while the model learns
        behind = open_autoencoder(real.encoder)
    denoiser, judge = Denoiser(model, autoencoder=behind), PictureJudge(real)
    settings = model.settings
    classes = settings.classes
    labels = np.arange(COUNT) % len(real.classes)
    conditions = torch.from_numpy(labels)
    if settings.text:
        # what is said of images from all over the set
        which = np.arange(COUNT) * len(real) // COUNT
        labels = real.labels[which]
        captions = [real.said[i] for i in which]
        conditions = torch.from_numpy(
            captions_as_rows(captions, settings.words, settings.word_rows)
        )
    batch = max(1, MOST_PIXELS // real.pixels[0].size)

    def ask() -> Answered:
        device = next(model.parameters()).device
        request = SampleRequest(conditions.to(device), STEPS, batch=batch)
        images = sample(denoiser, denoiser.process, denoiser.shape, request, classes)
        pixels = images.float().cpu().numpy()
        scores = judge.score(pixels, labels)
        shown = denoiser.pixels(images[:SHOWN]).numpy()
        grid = base64.b64encode(png_bytes(image_grid(shown))).decode()
        recorder.log("pictures", **scores._asdict(), grid=grid)
        return Answered(COUNT, round(scores.accuracy * COUNT), None)

    return {"images": AskedQuestions(every, ask)}
