"""Feed-forwards whose neurons rest in a file, and are read when they are active (LLM in a flash, 2312.11514).

Of a layer with ReLU only neurons with a positive gate contribute. Which ones these are is said exactly by the gates,
which then stay in memory, or nearly by a predictor of low rank, and then the gates rest in the file too. A token's
output depends on its own neurons alone, whatever other tokens need and whatever is in memory.
"""

from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from weft.errors import UsageError
from weft.layout.boundary import gather_tokens, scatter_tokens
from weft.memory.kept_records import keep_records
from weft.memory.neuron_kernel import FEW, gate_values, kernel_for, neuron_sums
from weft.memory.neuron_predictor import LayerPredictor, gate_hashes, read_predictor
from weft.memory.neuron_slots import NeuronGroup, NeuronSlots, StagedNeurons
from weft.memory.tier_file import whole_pages
from weft.models.feed_forward import FeedForward
from weft.models.fused import times
from weft.models.module import Module
from weft.models.transformer import Transformer
from weft.models.values import Values
from weft.recipe import ModelShape

T = torch.Tensor

#: The weights of a neuron, in the order of its record. Where gates stay in memory, the record has the last two.
PARTS = ("gate", "up", "down")


#: Weights of gates that are widened at a time.
TILE = 1 << 20

#: Weights of neurons that are gathered and widened at a time, so that products find them in the processor's cache.
GATHERED = 1 << 18


class RestingFeedForward(Module):
    """Feed-forward with ReLU that reads the weights of active neurons from a file, and leaves out all others.

    ``ffn``: the feed-forward that this module replaces; ``predictor``: predicts which neurons are active; None: they
    are computed from the gate weight, which then stays in memory.

    Attributes:
        ``slots``: memory for neurons.
        ``stored``: data type of the weights in the file.
        ``gate``: this rank's gate weight ``[neurons, embed]``, in the type of the file, if there is no predictor.
        ``elsewhere``: True, as the weights are not in memory.
        ``following``: the next layer of this kind on this rank, whose neurons are read ahead, if there is one. In a
            list, as it is no submodule.
    """

    slots: NeuronSlots
    stored: torch.dtype
    gate: T
    elsewhere = True
    following: "list[RestingFeedForward]"

    def __init__(self, ffn: FeedForward, predictor: LayerPredictor | None) -> None:
        super().__init__(ffn.mesh, ffn.described, ffn.path)
        self.parts = PARTS if predictor else PARTS[1:]
        self.shapes = {name: ffn.logical[name] for name in PARTS}
        self.neurons, self.embed = ffn.logical["gate"].local_shape
        self.predictor = predictor
        self.following = []

    def early(self, x: T, whole: T, seen: object) -> None:
        """Do nothing and return None. A feed-forward may begin work before attention, but only a mixture of experts
        does.

        The method takes the place of :meth:`FeedForward.early`.
        """

    def forward(self, x: T, seen: object = None, early: object = None) -> T:
        """Map ``x`` ``[batch, seq/tp, embed]`` to the output of the same shape; ``seen`` and ``early`` are not used."""
        return scatter_tokens(self.share(gather_tokens(x, self.mesh)), self.mesh)

    def share(self, whole: T) -> T:
        """Map ``whole`` ``[batch, seq, embed]`` to this rank's part of the output, of the same shape."""
        x = whole.flatten(0, 1)
        gates: T | None = None
        if self.predictor is None:
            gates = self._gates(x)  # [tokens, neurons]
            active = gates > 0
        else:
            active = self.predictor.active(x.float())
        out = torch.zeros_like(x)
        for turn, group in enumerate(self.slots.using(_any_of(active))):
            # this layer's own reads are under way, and come first
            for layer in () if turn else self.following:
                layer.expect(x)
            self._add(out, x, group, active, gates)
        return out.view_as(whole)

    def expect(self, x: T) -> None:
        """Begin to read the neurons that this layer would use for ``x`` ``[tokens, embed]``, the input of the layer
        before, which differs little from its own. Nothing is read without a predictor, nor for many tokens, which
        together use nearly all neurons.
        """
        if self.predictor is not None and len(x) <= FEW and self.slots.guessing:
            self.slots.expect(_any_of(self.predictor.active(x.float())))

    def _add(self, out: T, x: T, group: NeuronGroup, active: T, gates: T | None) -> None:  # fmt: skip
        """Add to ``out`` ``[tokens, embed]`` what the neurons of a group give for ``x``, of the same shape.

        ``active``: which neurons each token uses, ``[tokens, neurons]``; ``gates``: values of the gates, of the same
        shape, if they are known already.
        """
        places = torch.from_numpy(group.records).to(x.device)
        at = torch.from_numpy(group.neurons).to(x.device)
        kernel = kernel_for(x, self.stored)
        if kernel is not None:
            out += neuron_sums(kernel, x, group.memory, places, at, active, gates)
            return
        # [records, numbers]
        records = group.memory.view(self.stored)
        if gates is not None:
            gated = gates[:, at]
        else:
            weights = records[:, : self.embed]
            tiles = places.split(max(1, GATHERED // self.embed))
            values = [x @ weights.index_select(0, tile).to(x.dtype).t() for tile in tiles]  # fmt: skip
            gated = torch.cat(values, 1).relu_().mul_(active[:, at])
            # a predictor names more neurons than are active
            used = (gated > 0).any(0).nonzero().flatten()
            gated, places = gated[:, used], places[used]
        first = (len(self.parts) - 2) * self.embed
        weights = records[:, first : first + 2 * self.embed]
        size = max(1, GATHERED // (2 * self.embed))
        for tile, factors in zip(places.split(size), gated.split(size, 1), strict=True):
            gathered = weights.index_select(0, tile).to(x.dtype)
            up, down = gathered.unflatten(1, (2, self.embed)).unbind(1)
            out.addmm_(factors * (x @ up.t()), down)

    def _gates(self, x: T) -> T:
        """Return the positive parts of the gates of the tokens ``x``, of which some are widened at a time if they are
        stored in few bits.
        """
        if self.gate.dtype == x.dtype:
            return times(x, self.gate).relu_()
        kernel = kernel_for(x, self.stored)
        if kernel is not None:
            return gate_values(kernel, x, self.gate)
        tiles = self.gate.split(max(64, TILE // self.embed))
        return torch.cat([x @ tile.to(x.dtype).t() for tile in tiles], 1).relu_()


def _any_of(active: T) -> np.ndarray:
    """Return the ascending indices of the neurons that any token uses. ``active``: ``[tokens, neurons]``."""
    return active.any(0).nonzero().flatten().cpu().numpy()


class RestingNeurons:
    """Keeps the feed-forward neurons of a model in a file while the model generates.

    ``folder``: folder of the file; ``share``: share of the feed-forwards' weights that fits in memory, from 0 to 1,
    gate weights or predictor included; ``predictor``: file of a predictor of active neurons; None: the gate weights
    stay in memory.

    Attributes:
        ``lines``: lines for the user about the file.
    """

    staged: StagedNeurons

    def __init__(
        self, folder: Path, share: float, predictor: Path | None = None
    ) -> None:
        self.folder, self.share, self.predictor = folder, share, predictor
        self.lines: list[str] = []
        self.layers: dict[int, RestingFeedForward] = {}

    def lift(self, model: Transformer, values: Values) -> None:
        """Store the neurons of ``model`` in the file, and replace its feed-forwards by modules that read a neuron when
        it is active.

        ``model``: its parameters must not be allocated yet; ``values``: function that reads a parameter. Raises
        :class:`UsageError` for a model without ReLU, for a predictor of another model, and for a share that has no room
        for what must stay in memory.
        """
        self._check(model)
        predictors: dict[int, LayerPredictor] = {}
        if self.predictor is not None:
            predictors = read_predictor(self.predictor, gate_hashes(model, values))
        for number, block in model.blocks.items():
            own, ffn = predictors.get(int(number)), cast(FeedForward, block.ffn)
            part = own and self._part(own, ffn, model)
            block.ffn = self.layers[int(number)] = RestingFeedForward(ffn, part)
        self._store(model, values)

    def _check(self, model: Transformer) -> None:
        shape = model.shape
        if not has_plain_relu(shape):
            raise UsageError(
                f"--neurons-in is for dense models with activation relu, and this one has {_other(shape)}; leave it "
                "out, or train one with model.activation = 'relu'"
            )
        if shape.adapter is not None:
            raise UsageError(
                "--neurons-in is for models without adapters; merge it first (weft export --merge)"
            )

    @staticmethod
    def _part(predictor: LayerPredictor, ffn: FeedForward, model: Transformer) -> LayerPredictor:  # fmt: skip
        """Return the predictor of the neurons that this rank has."""
        rows = slice(*ffn.logical["gate"].box[0])
        parts = predictor.a, predictor.b[rows], predictor.bias[rows]
        return LayerPredictor(*(part.float().to(model.mesh.device) for part in parts))

    def _store(self, model: Transformer, values: Values) -> None:
        """Open or write the file, and give each layer memory for its neurons."""
        modules = [*self.layers.values()]
        digest = blake2b(digest_size=16)
        some = modules[0]
        for module in modules:
            rows = self._rows(module, values)
            module.stored = rows.dtype
            if module.predictor is None:
                logical = module.shapes["gate"]
                gate = values(f"{module.path}.gate", logical, logical.box)
                module.gate = gate.to(module.mesh.device)
            digest.update(f"{module.path} {rows.dtype} {tuple(rows.shape)}".encode())
            digest.update(rows.view(torch.uint8).numpy().data)
        last: tuple[int, T] = -1, torch.empty(0)

        def fill(index: int, record: T) -> None:
            nonlocal last
            layer, neuron = divmod(index, some.neurons)
            if last[0] != layer:
                last = layer, self._rows(modules[layer], values)
            bytes_of = last[1][neuron].view(torch.uint8)
            record[: len(bytes_of)].copy_(bytes_of)

        row = len(some.parts) * some.embed * some.stored.itemsize
        kept = keep_records(
            self.folder, "--neurons-in", f"neurons-{digest.hexdigest()}", len(modules) * some.neurons, row, fill,
            torch.device("cpu"), compared=False,
        )  # fmt: skip
        self.lines += [*kept.lines, *filter(None, [kept.file.note])]
        self.staged = StagedNeurons(kept)
        weights = 3 * some.neurons * some.embed * some.stored.itemsize
        stays = some.predictor.nbytes if some.predictor else weights // 3
        count = int((self.share * weights - stays) / whole_pages(row))
        if self.share == 1:
            count = some.neurons
        if count < 1:
            raise UsageError(
                f"--neurons {self.share:g} has no room for {'the predictor' if some.predictor else 'the gates'}, which "
                f"take {stays / weights:.2f} of the feed-forwards; give more"
                + ("" if some.predictor else ", or a --predictor")
            )
        for number, module in enumerate(modules):
            first = number * module.neurons
            module.slots = NeuronSlots(self.staged, first, module.neurons, count, model.mesh.device)  # fmt: skip
        for module, following in pairwise(modules):
            module.following.append(following)
        self.lines.append(
            f"{min(count, some.neurons):,} of {some.neurons:,} neurons of each layer have room in memory"
        )

    @staticmethod
    def _rows(module: RestingFeedForward, values: Values) -> T:
        """Return the records of a layer: ``[neurons, parts * embed]``."""
        weights = []
        for name in module.parts:
            logical = module.shapes[name]
            weight = values(f"{module.path}.{name}", logical, logical.box)
            weights.append(weight.t() if name == "down" else weight)
        return torch.cat(weights, 1).contiguous()

    def report(self) -> str:
        """Return a line of text about reads from the file: how many neurons tokens have used, how many of these uses
        needed a read, and how many megabytes were read.
        """
        counts, size = self.staged.counts, self.staged.size
        share = counts["read"] / max(1, counts["used"])
        ahead = f", {counts['ahead']:,} of them ahead" if counts["ahead"] else ""
        return (
            f"{counts['used']:,} neurons were used, and {counts['read']:,} ({share:.0%}) read from {self.folder}, "
            f"{counts['read'] * size / 1e6:,.1f} MB{ahead}"
        )


def has_plain_relu(shape: ModelShape) -> bool:
    """Return whether all feed-forwards of a model of ``shape`` are dense ones with ReLU, one in each layer."""
    plain = not (shape.kind or shape.mixtures or shape.small_ffn)
    return plain and shape.activation == "relu"


def _other(shape: ModelShape) -> str:
    """Return what a model has in place of dense feed-forwards with ReLU."""
    if shape.kind:
        return f"a plugin's layers ({shape.kind})"
    if shape.small_ffn:
        return "small feed-forwards beside the big ones"
    return "experts" if shape.mixtures else f"activation {shape.activation}"


def feed_forward_inputs(model: Transformer, keep: Any) -> list[Any]:
    """Register forward hooks that call ``keep(layer, x)`` with each layer's index and the input of its feed-forward.

    Returns the hooks' handles, by which the caller removes them.
    """
    ffns = {int(i): cast(Module, block.ffn) for i, block in model.blocks.items()}
    return [
        ffn.register_forward_pre_hook(lambda _, given, i=i: keep(i, given[0]))
        for i, ffn in ffns.items()
    ]  # fmt: skip
