"""Autoencoders in folders, in the form of diffusers."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from weft.errors import WeftError
from weft.models.autoencoder import Autoencoder
from weft.models.autoencoder_sizes import autoencoder_config, autoencoder_settings
from weft.paths import home_path

#: The file of the weights.
WEIGHTS = "diffusion_pytorch_model.safetensors"
#: Names of the products of attention in older files.
OLD_NAMES = {"query.": "to_q.", "key.": "to_k.", "value.": "to_v.", "proj_attn.": "to_out.0."}  # fmt: skip
#: The file of a checkpoint of a diffusion transformer that says where the autoencoder of its images is.
AUTOENCODER_FILE = "autoencoder.json"


def open_autoencoder(folder: str | Path) -> Autoencoder:
    """Open the autoencoder in ``folder``, which diffusers or :func:`save_autoencoder` has written.

    Raises :class:`UsageError` if its configuration is not supported, and :class:`WeftError` if its files cannot be
    read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    place = home_path(folder)
    try:
        config = json.loads((place / "config.json").read_text())
        tensors = load_file(place / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise WeftError(f"{place} cannot be read as an autoencoder of diffusers: {error}") from None  # fmt: skip
    if not isinstance(config, dict):
        raise WeftError(f"{place} cannot be read as an autoencoder of diffusers: config.json is no object")  # fmt: skip
    # sizes that the weights do not have take no memory
    with torch.device("meta"):
        model = Autoencoder(autoencoder_settings(config))
    wanted = model.state_dict()
    values = {}
    for name, tensor in tensors.items():
        for old, new in OLD_NAMES.items():
            name = name.replace(f"attentions.0.{old}", f"attentions.0.{new}")
        # in the oldest files products are convolutions of one pixel
        fits = name in wanted and wanted[name].numel() == tensor.numel()
        values[name] = tensor.reshape(wanted[name].shape) if fits else tensor
    wrong = sorted({*wanted} ^ {*values}) or [
        name for name in wanted if wanted[name].shape != values[name].shape
    ]
    if wrong:
        raise WeftError(f"{place}: its weights do not fit its config.json, the first is {wrong[0]}")  # fmt: skip
    # copies, as the file may change
    whole = {name: value.float().clone() for name, value in values.items()}
    model.load_state_dict(whole, assign=True)
    return model.eval().requires_grad_(False)


def save_autoencoder(model: Autoencoder, out: Path) -> Path:
    """Write ``model`` to the new folder ``out`` in the form that diffusers reads, and return the folder."""
    from safetensors.torch import save_file

    from weft.new_folder import new_folder

    with new_folder(out) as folder:
        text = json.dumps(autoencoder_config(model.settings), indent=2)
        (folder / "config.json").write_text(text + "\n")
        values = {n: v.contiguous().clone() for n, v in model.state_dict().items()}
        save_file(values, folder / WEIGHTS, {"format": "pt"})
    return out
