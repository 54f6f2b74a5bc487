"""Prune a trained model, and write it with its zeros left out."""

from collections.abc import Callable
from pathlib import Path

from weft.checkpoint.model import open_model, tokenizer_of
from weft.errors import UsageError
from weft.models.hugging_face import export, exported_dtype
from weft.models.pruning import Pruner, check_prunable, prune_weights
from weft.models.sparse_matrix import sparse_matrix
from weft.new_folder import check_new
from weft.registry import find


def prune_model(
    checkpoint: str, out: Path, share: float, by: str, texts: Path | None, tokens: int,
    warn: Callable[[str], None], ema: bool = False, dtype: str | None = None,
) -> str:  # fmt: skip
    """Prune the model ``checkpoint``, and write it to the new folder ``out``. Returns a line about zeros and bytes.

    The folder is in Hugging Face's form, but pruned weights are bitmaps and values (:mod:`weft.models.sparse_matrix`).
    All commands of Weft read it, under any layout.

    Args:
        ``share``: fraction of each weight's elements that become zero, from 0 to below 1.
        ``by``: name of the pruning technique.
        ``texts``: file with a text, for techniques that read one; else None.
        ``tokens``: number of the text's tokens that are read.
        ``warn``: called with a line for each damaged checkpoint that is skipped for an older one.
        ``ema``: whether the run's moving averages of the parameters are pruned.
        ``dtype``: type of the values; None: that of the model from which the run started.
    """
    check_new(out)
    if not 0 <= share < 1:
        raise UsageError(
            f"--share {share} is no part of the elements; give a number from 0 to below 1"
        )
    pruner = pruner_of(by)
    if pruner.reads_texts != (texts is not None):
        said = (
            "reads a text; give --data FILE"
            if pruner.reads_texts
            else "reads no text; leave out --data"
        )
        raise UsageError(f"--by {by} {said}")
    text = read_calibration_text(texts) if texts else ""
    model, files, length = open_model(checkpoint, "cpu", warn, ema)
    check_prunable(model.shape, checkpoint)
    ids = tokenizer_of(files, checkpoint).prompt_ids(text)[:tokens] if text else []
    names = prune_weights(model, pruner, share, ids)
    values = {name: value.detach() for name, value in model.named_parameters()}
    export(values, model.shape, out, exported_dtype(dtype, files), files, length, sparse=names)  # fmt: skip
    pruned = [values[name] for name in names]
    size = sum(weight.numel() for weight in pruned)
    zeros = sum(int((weight == 0).sum()) for weight in pruned)
    kind = exported_dtype(dtype, files) or pruned[0].dtype
    held = sum(sparse_matrix(weight.to(kind)).nbytes for weight in pruned)
    return (
        f"{zeros:,} of {size:,} elements of {len(names)} weights are zero ({zeros / size:.1%}); they take "
        f"{held:,} bytes, and {size * kind.itemsize:,} with zeros"
    )


def pruner_of(name: str) -> Pruner:
    """Return the pruning technique called ``name``. Raises :class:`UsageError` if there is none."""
    pruner: Pruner = find("pruner", name).implementation()
    return pruner


def read_calibration_text(path: Path) -> str:
    """Return the text in the file ``path``. Raises :class:`UsageError` if it cannot be read or is empty."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--data {path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if not text.strip():
        raise UsageError(f"--data {path} is empty; give a file with a text")
    return text
