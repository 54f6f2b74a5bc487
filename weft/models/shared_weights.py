"""Several models of one shape in one memory: weights with equal content exist once, and so do modules of such weights.

A base model and its fine-tunes differ in some layers only. Content is compared by hash when weights are read. Blocks
whose parameters are all equal become one module object of several models, so that a batch with requests to these
models can run that block once (BlockLLM, Hu et al. 2024, 2404.18322; :mod:`weft.generate.span_groups`).
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from weft.errors import UsageError, WeftError
from weft.layout.dims import Box, Logical
from weft.models.products import OUTPUT, Form, form_of, read_only
from weft.models.transformer import Transformer
from weft.models.values import Values
from weft.recipe import ModelShape

T = torch.Tensor

#: Fields of a shape that make no difference to a trained model whose adapter is merged.
BEGINNING = ("origin", "init_std", "adapter")

#: Hashes of the weights of a model, by the names of the parameters.
Digests = Mapping[str, bytes]


def digest_of(tensor: T) -> bytes:
    """Return a hash of the type, shape and values of ``tensor``."""
    plain = tensor.detach().contiguous().cpu()
    content = sha256(repr((plain.dtype, *plain.shape)).encode())
    if plain.numel():
        content.update(plain.flatten().view(torch.uint8).numpy().data)
    return content.digest()


class SharedWeights:
    """All weights of several models, each distinct weight stored once. ``form``: form in which weights are held and
    multiplied (``float``, ``int8`` or ``int4``), or None for the form in which they are read. This object keeps no
    weights alive: they are freed with the last model that uses them.
    """

    def __init__(self, form: str | None = "float") -> None:
        self.form = form
        self.tensors: WeakValueDictionary[bytes, nn.Parameter] = WeakValueDictionary()
        self.products: WeakValueDictionary[tuple[bytes, ...], Form] = (
            WeakValueDictionary()
        )
        self.modules: WeakValueDictionary[Any, nn.Module] = WeakValueDictionary()
        self.outputs: WeakValueDictionary[bytes, Any] = WeakValueDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of all weights that are in use by some model, each content counted once."""
        alive = (*self.tensors.values(), *self.products.values())
        return sum(each.nbytes for each in alive)

    def living(self, known: Digests) -> dict[str, nn.Module]:
        """Find the parts of a model (embedding, blocks, norm, head) whose weights equal those of a part of another
        model in memory. Return that other model's modules, by the parts' names.

        ``known``: hashes of the model's weights, by the names of the parameters.
        """
        parts = {
            part: self.modules.get(part_key(part, names, known))
            for part, names in names_by_part(known).items()
        }
        return {part: module for part, module in parts.items() if module is not None}

    def fill(
        self, model: Transformer, values: Values, known: Digests | None = None,
        living: Mapping[str, nn.Module] | None = None, unchanged: bool = False,
    ) -> Digests:  # fmt: skip
        """Give ``model``, which is new and on the meta device, its weights. Returns their hashes.

        Raises :class:`WeftError` if a weight that is read has another hash than in ``known``.

        Args:
            ``model``: the model. It may lack blocks that are in ``living``.
            ``values``: function that reads the values of a parameter.
            ``known``: hashes that an earlier call for this model returned; None at the first call.
            ``living``: parts of other models with equal weights (:meth:`living`). They become parts of ``model`` and
                are not read.
            ``unchanged``: whether the files are known to be unchanged since that earlier call. What is read is then not
                hashed.
        """
        living, described = living or {}, dict(model.logical_parameters())
        digests = dict(known or {})
        for part, names in names_by_part(described).items():
            if part in living:
                continue
            if part != "head":
                self._read(model, names, described, values, digests, unchanged)
                key = part_key(part, names, digests)
                shared = self.modules.setdefault(key, model.get_submodule(part))
                model.set_submodule(part, shared)
            elif known is None or digests["head"] not in self.outputs:
                # the output layer has no module
                self._read(model, names, described, values, digests, unchanged)
        blocks = dict(model.blocks)
        for part, module in living.items():
            kind, _, layer = part.partition(".")
            if kind == "blocks":
                blocks[layer] = module
            else:
                model.set_submodule(part, module)
        model.blocks = nn.ModuleDict({i: blocks[i] for i in sorted(blocks, key=int)})
        tied = digests.get("embedding.table", b"")
        self._convert(model, digests, digests.get("head", tied))
        return digests

    def _read(
        self, model: Transformer, names: Sequence[str], described: Mapping[str, Logical], values: Values,
        digests: dict[str, bytes], unchanged: bool,
    ) -> None:  # fmt: skip
        """Read the weights ``names`` of ``model``; those whose content is alive become the living ones."""
        for name in names:
            empty, logical = model.get_parameter(name), described[name]
            box: Box = logical.box
            read = values(name, logical, box).to(empty.dtype)
            digest = digests[name] if unchanged else digest_of(read)
            if digests.setdefault(name, digest) != digest:
                raise WeftError(
                    f"the weight {name} has changed since it was first read; start the server again"
                )
            weight = self.tensors.get(digest)
            if weight is None:
                on_device = read.to(model.mesh.device).detach()
                weight = nn.Parameter(on_device, requires_grad=False)
                self.tensors[digest] = weight
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = weight

    def _convert(self, model: Transformer, digests: Digests, output: bytes) -> None:
        """Convert the weights of ``model`` to the form in which they multiply."""
        if self.form is None:
            return

        def forming(word: str, names: Sequence[str], weight: T) -> Form:
            contents = [output if name == OUTPUT else digests[name] for name in names]
            key = word.encode(), *contents
            product = self.products.get(key)
            if product is None:
                product = self.products[key] = form_of(word, weight)
            return product

        logits = self.outputs.get(output)
        if logits is not None:
            model.logits = logits
            model._parameters.pop("head", None)
        read_only(model, self.form, forming)
        if model.logits is not None:
            model.logits = self.outputs.setdefault(output, model.logits)


def part_of(name: str) -> str:
    """Return the part of the model that the parameter ``name`` belongs to: embedding, a block, norm or head."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]


def names_by_part(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the ``names`` of parameters by the part of the model that they belong to."""
    by_part: dict[str, list[str]] = {}
    for name in names:
        by_part.setdefault(part_of(name), []).append(name)
    return by_part


def part_key(part: str, names: Iterable[str], digests: Digests) -> Hashable:
    """Return a key that is equal for two models if all their weights in one part are equal, so that they can share the
    part's module. ``part``: name of the part, such as a block.

    ``names``: the part's parameters; ``digests``: hashes of the model's weights, by the names of the parameters.
    """
    return part, *(digests[name] for name in sorted(names))


def output_key(model: Transformer) -> tuple[int, int]:
    """Return a key that is equal for models whose final norm and output layer are the same objects. Texts of these
    models can get their logits from one call.
    """
    if model.logits is not None:
        output: object = model.logits
    else:
        output = model.embedding if model.shape.tied else model.head
    return id(model.norm), id(output)


def chain_of(model: Transformer) -> list[object]:
    """Return a key for each module that ``model`` runs, in order: embedding, blocks, and norm with output layer.

    Keys are equal where two models have the same module.
    """
    blocks = [id(model.blocks[str(i)]) for i in range(len(model.blocks))]
    return [id(model.embedding), *blocks, output_key(model)]


def check_same_shape(name: str, shape: ModelShape, base: ModelShape) -> None:
    """Raise :class:`UsageError` if texts of two models cannot be computed together in one generation step of a server.

    They can if all fields of the two shapes are equal. Fields that make no difference once an adapter is merged
    (:data:`BEGINNING`) may differ. A model of a plugin is always refused. ``name`` and ``shape``: the one model;
    ``base``: shape of the other model.
    """
    if shape.kind:
        raise UsageError(f"{name} is a plugin's model, which shares no weights; serve it alone")  # fmt: skip
    apart = [
        f"{field} = {value!r} and not {getattr(base, field)!r}"
        for field, value in shape
        if field not in BEGINNING and value != getattr(base, field)
    ]
    if apart:
        raise UsageError(
            f"{name} is of another shape than the base, with {', '.join(apart)}; serve it alone"
        )
