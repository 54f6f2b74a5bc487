"""Open a trained model from any storage or format, and export it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.checkpoint.convert.gguf_write import export_gguf
from weft.checkpoint.convert.peft import write_adapter
from weft.checkpoint.hub import local_path
from weft.checkpoint.model_card import write_model_card
from weft.checkpoint.store import learned_length, load_newest, stored_files
from weft.checkpoint.weights import (
    AVERAGE,
    base_name,
    is_foreign,
    open_pretrained,
    open_trained,
    stored_name,
)
from weft.data.tokenizer import Tokenizer, tokenizer_from_files
from weft.errors import UsageError, WeftError
from weft.layout.mesh import Mesh
from weft.models.adapters import base_of, merged_parameters
from weft.models.hugging_face import export, exported_dtype
from weft.new_folder import check_new
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

if TYPE_CHECKING:
    from weft.checkpoint.address import Where
    from weft.checkpoint.load import StoredCheckpoint
    from weft.models.transformer import Transformer
    from weft.models.values import Values


class OpenedModel(NamedTuple):
    """Trained model, with the other files of its folder or checkpoint.

    ``files``: contents of the other files (tokenizer, chat template), by name. ``length``: context length in training,
    in tokens, or None if it is not known (:func:`learned_length`).
    """

    model: Transformer
    files: dict[str, bytes]
    length: int | None


def open_model(
    where: Where, device: str, warn: Callable[[str], None], ema: bool = False, mesh: Mesh | None = None,
    lift: Callable[..., None] | None = None,
) -> OpenedModel:  # fmt: skip
    """Open a trained model: that of a run, of a checkpoint, or of any name that ``model.from`` accepts.

    Arguments:
        ``where``: the run's folder, the checkpoint or the name.
        ``device``: device of the weights.
        ``warn``: called with a line for each damaged checkpoint that is skipped for an older one.
        ``ema``: load the run's moving averages of the parameters.
        ``mesh``: the ranks that share the model; None: this rank alone.
        ``lift``: function that moves some weights out of the device's memory. It is called with the model and the
            function that reads the parameters' values. None: all weights stay in the device's memory.
    """
    mesh, where = mesh or Mesh.single(device), local_path(str(where))

    def built(shape: ModelShape, values: Values) -> Transformer:
        lifted = lift and partial(lift, values=values)
        return parallelize(shape, mesh, Train(), values, lift=lifted, summed=False)[0]

    if is_foreign(where):
        pretrained = open_pretrained(where)
        if pretrained.values is None:
            raise WeftError(
                f"{where} is a configuration without weights; give the folder that has them"
            )
        if ema:
            raise WeftError(
                f"{where} is no checkpoint of a run of Weft's, which alone have averages; leave out --ema"
            )
        model = built(pretrained.shape, pretrained.values)
        return OpenedModel(model, dict(pretrained.files), None)

    def load(checkpoint: StoredCheckpoint) -> Transformer:
        pretrained = open_trained(checkpoint, ema=ema)
        assert pretrained.values is not None
        if pretrained.shape.adapter is not None or lift is not None:
            return built(pretrained.shape, pretrained.values)
        model, state = parallelize(
            pretrained.shape,
            mesh,
            Train(),
            lambda name, logical, box: torch.zeros(()),
            summed=False,
        )
        checkpoint.load(
            {stored_name(checkpoint, h.name, ema): h.part(h.local) for h in state.held}
        )
        return model

    def check(checkpoint: StoredCheckpoint) -> None:
        if ema and not any(name.startswith(AVERAGE) for name in checkpoint.tensors):
            raise WeftError(f"{checkpoint} has no averages of its parameters; train with optimizer.ema = 0.999, say, "
                            "or leave out --ema")  # fmt: skip

    checkpoint, model = load_newest([where], load, warn, check)
    return OpenedModel(model, stored_files(checkpoint), learned_length(checkpoint))


def tokenizer_of(
    files: dict[str, bytes], where: Where, warn: Callable[[str], None] | None = None
) -> Tokenizer:
    """Return the tokenizer of the model ``where`` from the model's ``files``.

    ``files``: contents of the files beside the weights, by name; ``warn``: if given, called when the tokenizer has no
    end-of-text token. Raises :class:`WeftError` if there is no tokenizer.
    """
    tokenizer = tokenizer_from_files(files, str(where))
    if warn is not None and not tokenizer.stops:
        warn(
            f"{where} has no end token: texts go on until they have as many tokens as are asked for"
        )
    return tokenizer


def export_model(
    checkpoint: str, out: Path, warn: Callable[[str], None], merge: bool = False, ema: bool = False,
    dtype: str | None = None, form: str = "hf",
) -> Path:  # fmt: skip
    """Export a model with its tokenizer and chat template to the new folder or file ``out``, and return its path.

    An adapter is written alone, in PEFT's format, unless it is merged.

    Arguments:
        ``checkpoint``: the folder of a run, a checkpoint, or any name that ``model.from`` accepts.
        ``warn``: called with a line for each damaged checkpoint that is skipped for an older one.
        ``merge``: merge an adapter into its base model.
        ``ema``: export the run's moving averages of the parameters.
        ``dtype``: type of the weights; None: the type of the model from which the run started.
        ``form``: ``hf`` (a Hugging Face folder) or ``gguf`` (one file).
    """
    check_new(out)
    model, files, length = open_model(checkpoint, "cpu", warn, ema)
    if model.shape.kind == "diffusion":
        if form != "hf" or merge:
            option = "--merge" if merge else f"--format {form}"
            raise UsageError(
                f"{option} is of models of tokens; {checkpoint} makes images, which diffusers reads; leave it out"
            )
        from weft.models.diffusers_weights import export_diffusers

        kind = getattr(torch, dtype) if dtype else torch.float32
        values = {n: p.detach().to(kind) for n, p in model.named_parameters()}
        return export_diffusers(model.shape, values, out)
    if model.shape.kind:
        raise WeftError(
            f"{checkpoint} is of a plugin's model ({model.shape.kind}), which no other program knows"
        )
    if merge and model.shape.adapter is None:
        raise WeftError(f"{checkpoint} has no adapter; leave out --merge")
    if form == "gguf":
        if model.shape.adapter is not None and not merge:
            raise UsageError(
                f"{checkpoint} has an adapter, and GGUF is written of whole models; give --merge"
            )
        kind = dtype or str(exported_dtype(None, files) or torch.float32).removeprefix(
            "torch."
        )
        values = merged_parameters(model)
        return export_gguf(
            values.__getitem__, base_of(model.shape), out, kind, files, length
        )
    if merge or model.shape.adapter is None:
        export(
            merged_parameters(model),
            base_of(model.shape),
            out,
            exported_dtype(dtype, files),
            files,
            length,
        )
    elif dtype is not None:
        raise WeftError(f"{checkpoint} is an adapter, which is small and stays as it has learned; leave out --dtype, "
                        "or give --merge")  # fmt: skip
    else:
        write_adapter(
            dict(model.named_parameters()),
            model.shape,
            base_name(checkpoint),
            out,
            files,
        )
    write_model_card(checkpoint, out)
    return out
