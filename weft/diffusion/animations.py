"""Videos as animated files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weft.diffusion.image_files import as_pixels, magnified

if TYPE_CHECKING:
    import torch

#: Time for which a frame is shown, in milliseconds.
FRAME_MS = 100


def write_animation(video: torch.Tensor, path: Path) -> None:
    """Write ``video``, ``[channels, frames, height, width]`` from -1 to 1, as an animation that repeats for ever.

    The suffix of ``path`` chooses the format: ``.gif``, with at most 256 colours in a frame, or ``.png`` with all
    colours. Pixels of small videos are shown enlarged. Pillow must be installed.
    """
    import PIL.Image

    values = video.float().cpu().numpy()
    frames = [
        PIL.Image.fromarray(np.ascontiguousarray(magnified(as_pixels(values[:, i]))))
        for i in range(values.shape[1])
    ]
    frames[0].save(
        path, save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0
    )
