"""Predictors of the neurons of feed-forward layers that will be active (LLM in a flash, 2312.11514).

A neuron of a layer with ReLU is active if its gate is positive. A matrix of low rank says which gates are, so that the
gates themselves need not be in memory. A predictor belongs to the weights that it was trained for.
"""

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from weft.errors import UsageError
from weft.layout.dims import whole_box
from weft.models.transformer import Transformer
from weft.models.values import Values

T = torch.Tensor

#: Metadata of the files.
KIND = "weft neuron predictor"


class LayerPredictor(NamedTuple):
    """Predictor of one layer's active neurons: those for which ``(x a^T) b^T + bias`` is positive.

    ``x`` is the input of the feed-forward.

    Attributes:
        ``a``: ``[rank, embed]``.
        ``b``: ``[neurons, rank]``.
        ``bias``: ``[neurons]``.
    """

    a: T
    b: T
    bias: T

    def active(self, x: T) -> T:
        """Return which neurons are predicted to be active for each token: bool ``[tokens, neurons]``.

        ``x``: the tokens' inputs to the feed-forward, ``[tokens, embed]``.
        """
        return torch.addmm(self.bias, x @ self.a.t(), self.b.t()) > 0

    @property
    def nbytes(self) -> int:
        """Bytes of the predictor's matrices in memory."""
        return self.a.nbytes + self.b.nbytes + self.bias.nbytes


def gates_of(model: Transformer, values: Values) -> Iterator[tuple[int, T]]:
    """Yield the index and the gate weight ``[neurons, embed]`` of each layer on this rank.

    ``model``: a model whose feed-forwards are dense; ``values``: function that reads the values of a parameter.
    """
    for name, logical in model.logical_parameters():
        if name.endswith(".ffn.gate"):
            gate = values(name, logical, whole_box(logical.shape))
            yield int(name.split(".")[1]), gate


def gate_hashes(model: Transformer, values: Values) -> dict[int, str]:
    """Return a hash of the gate weight of each layer on this rank, by which a predictor's file is matched to its model.

    ``values``: function that reads the values of a parameter of ``model``.
    """
    hashes = {}
    for layer, gate in gates_of(model, values):
        numbers = gate.float().contiguous().flatten().view(torch.uint8).numpy()
        hashes[layer] = blake2b(numbers.data, digest_size=16).hexdigest()
    return hashes


def write_predictor(path: Path, layers: dict[int, LayerPredictor], gates: dict[int, str]) -> None:  # fmt: skip
    """Write the predictors of all ``layers`` to the file ``path``.

    ``gates``: hash of each layer's gate weight, which is stored so that the file is used with this model only.
    """
    tensors = {
        f"{layer}.{name}": value.contiguous()
        for layer, predictor in layers.items()
        for name, value in predictor._asdict().items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, {"kind": KIND, "gates": json.dumps(gates)})


def read_predictor(path: Path, gates: dict[int, str]) -> dict[int, LayerPredictor]:
    """Read the predictors of some layers from the file ``path``.

    ``gates``: hash of the gate weight of each of these layers. Raises :class:`UsageError` if the file holds no
    predictor, or the predictor of another model.
    """
    try:
        with safe_open(path, "pt") as file:
            known, names = file.metadata() or {}, list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--predictor {path} cannot be read: {error}") from None
    if known.get("kind") != KIND:
        raise UsageError(f"--predictor {path} is no predictor; weft predictor trains one")  # fmt: skip
    try:
        of_file = {int(layer): digest for layer, digest in json.loads(known["gates"]).items()}  # fmt: skip
        if any(of_file.get(layer) != digest for layer, digest in gates.items()):
            raise UsageError(
                f"--predictor {path} was trained for another model; train one for this model with weft predictor"
            )
        fields = LayerPredictor._fields
        return {i: LayerPredictor(*(tensors[f"{i}.{name}"] for name in fields)) for i in gates}  # fmt: skip
    except (AttributeError, KeyError, ValueError):
        raise UsageError(f"--predictor {path} is damaged; train it again with weft predictor") from None  # fmt: skip
