"""Weights in tiles: a product that is larger than memory, whose weight comes and goes tile by tile.

ZeRO-Infinity (Rajbhandari et al. 2021, 2104.07857, section 5.1.3) calls these products tiled operators. A weight
``[out, in]`` is cut along ``out``. A tile has the same share of every rank's rows, so that a rank's rows of all tiles
together are still one range of rows of the logical tensor. They rest side by side, and whoever reads the state between
two steps (checkpoints, copies, proofs) sees one tensor. In a pass every tile is fetched, gathered, multiplied and freed
before the next is gathered; backward also reduces its gradient and lets it rest. Updates go tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from weft.layout.placement import Placement
from weft.memory.resting_tiles import rest_side_by_side, rows_of_whole_pages
from weft.models.fused import times
from weft.models.projections import Projections
from weft.models.widened import multiply
from weft.parallel.part_unit import PartUnit
from weft.parallel.state import Held, State, Unit, Updater
from weft.parallel.units import OWN, Full, TableUnit

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.memory.on_device import OnDevice
    from weft.models.transformer import Transformer

T = torch.Tensor


class WeightTile(TableUnit):
    """One tile of a weight, as a unit that is gathered, reduced and updated by itself.

    ``weight``: the weight, of which every rank holds a share of the rows. ``first``, ``last``: the rows of each share
    that belong to the tile, ``last`` excluded. The other arguments are those of
    :class:`weft.parallel.units.TableUnit`, with one parameter.
    """

    def __init__(
        self, weight: TiledWeight, first: int, last: int, full: Full, mesh: Mesh,
        compute: torch.dtype, tiers: OnDevice,
    ) -> None:  # fmt: skip
        self.weight, self.first, self.last = weight, first, last
        self.in_use = ExitStack()
        self.gradient: T | None = None  # of the tile's rows, until it is reduced
        super().__init__([full], mesh, compute, tiers)
        # A lone rank computes with what was read, where that has the right type.
        self.as_read = (
            self.size == 1
            and self.wide == compute
            and self.held[0].local.device == mesh.device
        )

    def rest(self) -> None:
        """Drop the tile's reduced gradients. Unlike in other units nothing is moved here, because :class:`TiledWeight`
        moves all tiles.
        """
        self.reduced = {}

    @torch.no_grad()
    def gather(self, values: Callable[[Held], T] = OWN) -> None:
        """Gather the tile's rows from all ranks, ``[rows, in]``. Collective.

        ``values``: function from a parameter to the values of this rank's rows, as in :meth:`TableUnit.gather`.
        """
        if self.live or not self.as_read:
            super().gather(values)
            return
        self.in_use.enter_context(self.tiers.at_hand(self, "weights"))
        self.full[0].data = values(self.held[0])
        self.live = True

    def release(self, drop: bool) -> None:
        """Free the memory of the tile's gathered rows, whatever ``drop`` is."""
        if self.live and self.as_read:
            self.full[0].data = self.full[0].data.new_empty(0)
            self.in_use.close()
            self.live = False
        else:
            super().release(True)

    def share_of(self, grads: Mapping[str, T]) -> Mapping[str, T]:
        """Return the tile's rows of the weight's reduced gradient in ``grads``."""
        name, whole = self.held[0].name, grads[self.held[0].name]
        if whole is self.weight.reduced.get(name):
            return self.reduced
        return {name: self.rows_of(whole)}

    def rows_of(self, whole: T) -> T:
        """Return the tile's part of ``whole``, a tensor of all rows of the weight that this rank holds."""
        rows = len(self.held[0].local)  # none if the rank has fewer rows than others
        return whole.narrow(0, self.first if rows else 0, rows)

    @torch.no_grad()
    def add_gradient(self, gradient: T) -> None:
        """Sum ``gradient`` ``[rows, in]`` over the ranks that share the state, and add the sum to the tile's
        gradient of this step.

        Collective. The tile's gathered rows are not read, so that the caller may free them first.
        """
        self.weight.begin_gradient()
        if self.wide != self.compute:
            self.sums[self.held[0].name] = gradient.to(self.wide)
        else:
            self.gradient = gradient
        self.reduce()
        self.weight.end_gradient()

    def _taken(self, h: Held, full: nn.Parameter) -> T | None:
        gradient, self.gradient = self.gradient, None
        return self.sums.pop(h.name, gradient)


class TiledWeight(PartUnit):
    """Unit of a weight that is cut in tiles (ranges of rows), which a matrix product gathers one by one.

    The weight itself is never gathered whole. ``named``: the weight, ``[out, in]``; ``tiles``: largest number of tiles
    into which it is cut. In a file each tile fills whole pages, so that there may be fewer tiles. The other arguments
    are those of :class:`weft.parallel.units.TableUnit`.

    Attributes:
        ``pieces``: the tiles.
        ``rows``: number of output rows that this rank computes with.
        ``share``: largest number of these rows that one rank keeps as its part of the state.
    """

    def __init__(
        self, named: Sequence[Full], mesh: Mesh, compute: torch.dtype, tiers: OnDevice, tiles: int
    ) -> None:  # fmt: skip
        (full,) = named
        super().__init__(full, mesh, compute, tiers)
        self.rows, width = full.logical.local_shape
        self.share = -(-self.rows // self.size)
        device = full.parameter.device
        rows = -(-self.share // tiles)
        if "file" in tiers.places.values():
            step = rows_of_whole_pages(width * self.wide.itemsize)
            rows = -(-rows // step) * step
        first, last = full.placement.box[0]
        self._tiles = []
        for begin in range(0, self.share, rows):
            end = min(begin + rows, self.share)
            box = ((min(first + begin, last), min(first + end, last)), full.placement.box[1])  # fmt: skip
            at = Placement(box, full.placement.replica, full.placement.replicas)
            values = torch.empty(self.size * (end - begin), width, dtype=compute, device=device)  # fmt: skip
            values.untyped_storage().resize_(0)
            part = full._replace(parameter=nn.Parameter(values, self.learns), placement=at)  # fmt: skip
            self._tiles.append(WeightTile(self, begin, end, part, mesh, compute, tiers))
        local = self._side_by_side("weights", [t.held[0].local for t in self._tiles])
        for tile in self._tiles:
            tile.held[0].parameter.data = tile.held[0].local.data
        parameter = nn.Parameter(local, self.learns)
        self.held = [Held(full.name, full.logical, full.placement, parameter.detach(), parameter)]  # fmt: skip
        self.reduced = {}
        if self.learns and tiers.places.get("gradients") == "file":
            grads = [torch.zeros_like(t.held[0].local) for t in self._tiles]
            self.reduced[full.name] = self._side_by_side("gradients", grads)
            for tile, grad in zip(self._tiles, grads, strict=True):
                tile.reduced = {full.name: grad}

    def _side_by_side(self, kind: str, tensors: Sequence[T], slot: str = "") -> T:
        return rest_side_by_side(self.tiers, self._tiles, kind, tensors, slot)

    @property
    def pieces(self) -> Sequence[Unit]:
        return self._tiles

    @property
    def tiles(self) -> Sequence[WeightTile]:
        """The tiles, in the order of their rows."""
        return self._tiles

    def make_slots(self, optimizer: Updater, tiers: OnDevice) -> None:
        """Make the slots of ``optimizer`` for every tile, and let them rest in ``tiers``. Slots of one name, such as
        first moments, rest side by side, like the tiles.
        """
        if not self.learns:
            return
        (held,) = self.held
        for tile in self._tiles:
            h = tile.held[0]
            h.slots |= optimizer.slots(h)
            h.updates = torch.zeros((), device=h.local.device)
        held.updates = self._tiles[0].held[0].updates
        for slot in self._tiles[0].held[0].slots:
            parts = [tile.held[0].slots[slot].values for tile in self._tiles]
            held.slots[slot] = held.part(self._side_by_side("moments", parts, slot))

    def release(self, drop: bool) -> None:
        """Free the memory of tiles that are still there after an error, whatever ``drop`` says."""
        for tile in self._tiles:
            tile.release(True)

    def begin_gradient(self) -> None:
        """Make room for the weight's gradient of this step, if that has not been done yet."""
        (held,) = self.held
        if held.parameter.grad is not None:
            return
        for tile in self._tiles:
            tile.held[0].norm = tile.held[0].parameter.grad = None
        if self.reduced:
            held.parameter.grad = self.reduced[held.name]
            return
        held.parameter.grad = torch.zeros_like(held.local)
        for tile in self._tiles:
            at = tile.held[0]
            at.parameter.grad = tile.rows_of(held.parameter.grad)

    def end_gradient(self) -> None:
        """Compute the norm of the weight's gradient, if the gradients of its tiles have gone to a file."""
        norms = [n for tile in self._tiles if (n := tile.held[0].norm) is not None]
        if norms:
            self.held[0].norm = torch.linalg.vector_norm(torch.stack(norms))

    def columns(self, tile: WeightTile, y: T) -> T:
        """Return the columns of a product's output ``y`` that are computed with the rows of ``tile``, as a view.

        ``y`` is ``[tokens, size * share]``, where ``size`` is the number of ranks that share the weight, and ``share``
        the largest number of its rows on a rank. The result is ``[tokens, size, rows]``, where ``rows`` is the number
        of rows that the tile has of each rank.
        """
        return y.unflatten(1, (self.size, self.share))[:, :, tile.first : tile.last]


class TileUse(NamedTuple):
    """A tile that is in memory at present, during a product.

    ``number``: index of the tile's weight among the weights of the product. ``weight``, ``tile``: the weight and the
    tile. ``values``: the rows of the tile from all ranks, ``[rows, in]``.
    """

    number: int
    weight: TiledWeight
    tile: WeightTile
    values: T


class TiledProducts:
    """Multiplies an input by several weights without holding a whole weight: one tile (some rows of a weight) at a
    time.

    An instance is called in place of a module's linear layers; a call returns one product for each of ``weights``.
    ``state``: the training state of the run. It reads tiles ahead from where they rest, and applies postponed updates
    to a tile before its use.
    """

    def __init__(self, weights: Sequence[TiledWeight], state: State) -> None:
        self.weights, self.state = weights, state

    def __call__(self, x: T) -> tuple[T, ...]:
        """Map ``x`` ``[batch, seq, in]`` to ``[batch, seq, out]`` for each weight."""
        learns = torch.is_grad_enabled() and any(w.learns for w in self.weights)
        anchor = torch.zeros((), requires_grad=learns)
        results: tuple[T, ...] = _TiledProject.apply(x, anchor, self)
        return results

    def walk(self) -> Iterator[TileUse]:
        """Yield every tile of all weights in turn, gathered; the next tile is read while the caller computes.
        Collective.
        """
        uses = [(i, w, tile) for i, w in enumerate(self.weights) for tile in w.tiles]
        self.state.fetch(uses[0][2])
        for place, (number, weight, tile) in enumerate(uses):
            self.state.visit(tile)
            tile.gather()
            for _, _, following in uses[place + 1 : place + 2]:
                self.state.fetch(following)
            try:
                yield TileUse(number, weight, tile, tile.full[0].detach())
            finally:
                tile.release(True)


class _TiledProject(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, anchor, products):  # type: ignore[no-untyped-def]
        ctx.products = products
        ctx.save_for_backward(x if anchor.requires_grad else None)
        ctx.shape = x.shape
        rows = x.flatten(0, 1)  # [tokens, in]
        outputs = [rows.new_empty(len(rows), w.size * w.share) for w in products.weights]  # fmt: skip
        for number, weight, tile, values in products.walk():
            place = weight.columns(tile, outputs[number])
            place.copy_(times(rows, values).view(place.shape))
            del values
        pairs = zip(outputs, products.weights, strict=True)
        return tuple(y[:, : w.rows].unflatten(0, x.shape[:2]) for y, w in pairs)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        rows = None if x is None else x.detach().flatten(0, 1)
        weights = ctx.products.weights
        flat = [
            F.pad(g.flatten(0, 1), (0, w.size * w.share - w.rows))
            for g, w in zip(grads, weights, strict=True)
        ]
        if not ctx.needs_input_grad[0]:
            for weight, grad in zip(weights, flat, strict=True):
                for tile in weight.tiles if weight.learns else ():
                    _learn(weight, tile, grad, rows)
            return None, None, None
        d_x: T | None = None
        for number, weight, tile, values in ctx.products.walk():
            part = weight.columns(tile, flat[number]).flatten(1)
            d_x = times(part, values.t(), plus=d_x)
            del values
            tile.release(True)  # what follows needs its room
            if weight.learns:
                _learn(weight, tile, flat[number], rows)
        assert d_x is not None
        return d_x.view(ctx.shape), None, None


def _learn(weight: TiledWeight, tile: WeightTile, grad: T, rows: T | None) -> None:
    """Add the gradient of a tile to the step's. ``grad``: ``[tokens, size * share]``; ``rows``: ``[tokens, in]``."""
    assert rows is not None, "the input was not saved"
    part = weight.columns(tile, grad).flatten(1)  # [tokens, rows of the tile]
    tile.add_gradient(multiply(part.t(), rows))


def tiled_names(model: Transformer) -> set[str]:
    """Return the names of the weights of ``model`` that can be tiled: those of projections within its blocks.

    If ``tp`` does not divide the key/value heads, a rank uses only some rows of the weights that make them. Such
    weights cannot be tiled, and neither can the other projections with the same input.
    """
    names = set[str]()
    for module in model.blocks.modules():
        if isinstance(module, Projections):
            for group in module.TOGETHER:
                if not module.own_rows.keys() & {*group}:
                    names |= {module.inside(n) for n in group if n in module._parameters}  # fmt: skip
    return names


def put_tiles_in_place(model: Transformer, state: State) -> None:
    """Replace the products of all tiled weights (units of ``state``) in the modules of ``model`` by
    :class:`TiledProducts`.
    """
    tiled = {u.held[0].name: u for u in state.units if isinstance(u, TiledWeight)}
    for module in model.blocks.modules():
        if not isinstance(module, Projections):
            continue
        for group in module.TOGETHER:
            weights = [tiled[module.inside(n)] for n in group if module.inside(n) in tiled]  # fmt: skip
            if len(weights) < len(group):
                continue
            module.products[group] = TiledProducts(weights, state)
            for name, weight in zip(group, weights, strict=True):
                module.products[name,] = TiledProducts([weight], state)
                del module._parameters[name]
