"""The checkpoint format (docs/reference/checkpoint-format.md): logical tensors as immutable blocks.

A checkpoint is a folder: data files (safetensors-compatible, one per writing rank), a manifest per data file, other
files, and one root, ``weft.json``, which is created last. Names carry the attempt's random id, so that no attempt
ever touches another's files; without a root there is no checkpoint.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, cycle, pairwise, product
from typing import Any, NamedTuple

from weft.checkpoint.boxes import BLOCK, ROOT, DamagedCheckpoint, checksum, volume
from weft.layout.dims import Box, Tensor, extents, part, whole_box

FORMAT = 2

#: A wide tensor is cut into so many parts by columns, so that a later layout that cuts columns reads whole blocks.
COLUMNS = 8
#: Only tensors whose parts then have rows of at least so many bytes are cut by columns.
RUN = 512


class StoredBlock(NamedTuple):
    """Block of a checkpoint: a box of one tensor, stored row-major in a data file.

    Attributes:
        ``tensor``: name of the tensor.
        ``box``: the tensor's elements that the block holds.
        ``file``: name of the data file.
        ``offset``: byte of the file at which the block begins.
        ``size``: bytes of the block.
        ``digest``: xxh3-128 digest of these bytes.
    """

    tensor: str
    box: Box
    file: str
    offset: int
    size: int
    digest: str


def cut_blocks(box: Box, shape: Sequence[int], itemsize: int) -> Iterator[Box]:
    """Cut the box ``box`` of a tensor into the blocks of a checkpoint, which are smaller boxes. Yields these boxes.

    ``shape``: shape of the whole tensor; ``itemsize``: bytes of an element. If the tensor's last dimension is long, the
    box is first cut along it, at positions that depend on ``shape`` and not on ``box``. Then each part is cut along the
    first dimension, into blocks of similar size.
    """
    if not box:
        yield box
        return
    *front, (c0, c1) = box
    if not front:
        count = max(1, round(volume(box) * itemsize / BLOCK))
        yield from (
            ((c0 + a, c0 + b),)
            for a, b in (part(c1 - c0, count, i) for i in range(count))
        )
        return
    cuts = {c0, c1}
    if shape[-1] * itemsize >= COLUMNS * RUN:
        cuts |= {part(shape[-1], COLUMNS, i)[0] for i in range(COLUMNS)}
    (r0, r1), *middle = front
    for a, b in pairwise(sorted(c for c in cuts if c0 <= c <= c1)):
        row = volume(tuple(middle)) * (b - a) * itemsize
        # Quarters at least where they are not tiny, and a power of two: later cuts by rows then fall between blocks.
        count = max(
            -(-(r1 - r0) * row // BLOCK), min(4, (r1 - r0) * row // (BLOCK // 16)), 1
        )
        count = min(r1 - r0, 1 << (count - 1).bit_length())
        for i in range(count):
            first, last = part(r1 - r0, count, i)
            yield ((r0 + first, r0 + last), *middle, (a, b))


def block_name(name: str, box: Box) -> str:
    """Return the name of a tensor's block in its safetensors file, such as ``head@0:8,0:64``.

    ``name``: name of the tensor; ``box``: the elements that the block holds.
    """
    return f"{name}@{','.join(f'{lo}:{hi}' for lo, hi in box)}"


def file_head(
    blocks: Iterable[tuple[str, Box]], tensors: Mapping[str, Tensor]
) -> tuple[bytes, list[tuple[int, int]]]:
    """Return the head of a safetensors file of ``blocks``, and the offset and size in bytes of each block in that file.

    ``blocks``: pairs of a tensor's name and a box, in the order of the file; ``tensors``: descriptions of the tensors,
    by name.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt", "weft": str(FORMAT)}}
    at, spans = 0, []
    for name, box in blocks:
        size = volume(box) * tensors[name].itemsize
        table[block_name(name, box)] = {
            "dtype": tensors[name].dtype,
            "shape": extents(box),
            "data_offsets": [at, at + size],
        }
        spans.append((at, size))
        at += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 4096)  # the payload begins on a page
    return len(text).to_bytes(8, "little") + text, [
        (8 + len(text) + a, size) for a, size in spans
    ]


def manifest_json(
    file: str, size: int, tensors: Mapping[str, Tensor], blocks: Sequence[StoredBlock]
) -> bytes:
    """Return the manifest of a data file as JSON.

    ``file`` and ``size``: name and bytes of the data file; ``tensors``: descriptions by name of at least the tensors in
    the file; ``blocks``: the file's blocks. The manifest has a list for each field of the blocks.
    """
    names = list(
        dict.fromkeys(
            [b.tensor for b in blocks]
            + [name for name, t in tensors.items() if not t.numel]
        )
    )
    index = {name: i for i, name in enumerate(names)}
    return json.dumps({
        "format": FORMAT,
        "file": file,
        "size": size,
        "tensors": {name: _tensor(tensors[name]) for name in names},
        "tensor": [index[b.tensor] for b in blocks],
        "box": [[list(edge) for edge in b.box] for b in blocks],
        "offset": [b.offset for b in blocks],
        "bytes": [b.size for b in blocks],
        "xxh3": [b.digest for b in blocks],
    }, separators=(",", ":")).encode()  # fmt: skip


class Manifest:
    """Manifest of one data file: the tensors and blocks in that file.

    ``data``: bytes of the manifest; ``name``: its name, for error messages. ``tensors`` (attribute): descriptions of
    the file's tensors, by name. Iterating yields every block; :class:`StoredBlock` objects are created on demand.
    Raises :class:`DamagedCheckpoint` if ``data`` is no manifest.
    """

    def __init__(self, data: bytes, name: str) -> None:
        try:
            tree = json.loads(data)
            self.tensors = {
                key: read_tensor(value) for key, value in tree["tensors"].items()
            }
            names = list(self.tensors)
            rows = zip(
                tree["tensor"],
                tree["box"],
                tree["offset"],
                tree["bytes"],
                tree["xxh3"],
                strict=True,
            )
            self._file = str(tree["file"])
            self._rows: dict[str, list[tuple[list[list[int]], int, int, str]]] = {}
            for number, *row in rows:
                self._rows.setdefault(names[number], []).append(tuple(row))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise DamagedCheckpoint(
                f"{name} is not a manifest of format {FORMAT} ({type(error).__name__})"
            ) from None

    def blocks(self, tensor: str, box: Box | None = None) -> Iterator[StoredBlock]:
        """Yield the file's blocks of the tensor named ``tensor``, in the order of the file.

        ``box``: yield only blocks that overlap this box of the tensor; None yields all.
        """
        for edges, offset, size, xxh3 in self._rows.get(tensor, ()):
            # A plain loop instead of `meet`: every reader runs it for every block.
            for (lo, hi), (first, last) in zip(
                edges, box or (), strict=box is not None
            ):
                if lo >= last or first >= hi:
                    break
            else:
                yield StoredBlock(
                    tensor,
                    tuple((lo, hi) for lo, hi in edges),
                    self._file,
                    offset,
                    size,
                    xxh3,
                )

    def __iter__(self) -> Iterator[StoredBlock]:
        for tensor in self._rows:
            yield from self.blocks(tensor)


def _tensor(t: Tensor) -> dict[str, Any]:
    optional = {"dims": list(t.dims), "tied": t.tied}
    about = {name: value for name, value in optional.items() if value}
    return {"shape": list(t.shape), "dtype": t.dtype} | about


def read_tensor(tree: Mapping[str, Any]) -> Tensor:
    """Return the description of a tensor from its entry ``tree`` in a manifest or a root file."""
    return Tensor(
        tuple(tree["shape"]),
        tree["dtype"],
        tuple(tree.get("dims", ())),
        tree.get("tied"),
    )


def root_index(
    manifests: Mapping[str, tuple[Mapping[str, Tensor], Sequence[StoredBlock]]],
) -> dict[str, Any]:
    """Return the index in a checkpoint's root file: all tensors, and for each tensor which manifests list its blocks.

    ``manifests``: for each manifest, by name, the descriptions of its tensors, and its blocks. The index is a dict with
    three entries. ``manifests`` is a list of the manifests' names. ``places`` is a list of the ways in which tensors
    are spread over manifests. Each place is a list of pairs: the index of a manifest in ``manifests``, and the box of
    the tensor that this manifest's file holds. ``tensors`` gives for each tensor, by name, its description and the
    index of its place in ``places``. Raises :class:`DamagedCheckpoint` if the blocks of a tensor do not hold each
    element exactly once.
    """
    numbers = {name: i for i, name in enumerate(manifests)}
    tensors: dict[str, Tensor] = {}
    held: dict[str, dict[int, list[Box]]] = {}
    for name, (described, blocks) in manifests.items():
        for key, tensor in described.items():
            if tensors.setdefault(key, tensor) != tensor:
                raise DamagedCheckpoint(
                    f"{name} describes {key} otherwise than another manifest does"
                )
        for b in blocks:
            held.setdefault(b.tensor, {}).setdefault(numbers[name], []).append(b.box)
    places: dict[tuple[tuple[int, Box], ...], int] = {}
    table = {}
    for key in sorted(tensors):
        held.setdefault(key, {})
        _check_tiling(
            key, tensors[key].shape, list(chain.from_iterable(held[key].values()))
        )
        where = tuple(
            (number, boxes[0] if len(boxes) == 1 else _hull(boxes))
            for number, boxes in held[key].items()
        )
        table[key] = _tensor(tensors[key]) | {
            "place": places.setdefault(where, len(places))
        }
    listed = [
        [[number, [list(edge) for edge in box]] for number, box in where]
        for where in places
    ]
    return {"manifests": list(manifests), "tensors": table, "places": listed}


def _check_tiling(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raises unless every element of a tensor of ``shape`` is in exactly one of ``boxes``.

    How often an element is covered is a sum over the boxes' corners at or before it, of signs that alternate around a
    box (inclusion and exclusion). Such sums agree everywhere only if the corners themselves agree, so that what is
    compared are two multisets of corners: those of the boxes, and those of the whole tensor.
    """
    if any(len(box) != len(shape) for box in boxes) or not all(
        lo < hi for box in boxes for lo, hi in box
    ):
        raise DamagedCheckpoint(
            f"a block of {name} is no part of a tensor of shape {list(shape)}"
        )
    even = [sum(bits) % 2 == 0 for bits in product((0, 1), repeat=len(shape))]
    corners = list(chain.from_iterable(product(*box) for box in boxes))
    whole = list(product(*whole_box(shape)))
    odd = [not sign for sign in even]
    more = Counter(chain(compress(corners, cycle(even)), compress(whole, odd)))
    less = Counter(chain(compress(corners, cycle(odd)), compress(whole, even)))
    if dict(more) != dict(less):
        # At the first corner where they differ no other one counts: that element is covered wrongly.
        first = min(c for c in more.keys() | less.keys() if more[c] != less[c])
        covered, what = (
            sum(map(volume, boxes)),
            "more than once" if more[first] > less[first] else "in none",
        )
        if not all(0 <= at < n for at, n in zip(first, shape, strict=True)):
            what = "outside of the tensor"
        raise DamagedCheckpoint(
            f"the blocks of {name} have {covered} elements, the tensor has {math.prod(shape)}; {list(first)} is {what}"
        )


def _hull(boxes: Sequence[Box]) -> Box:
    return tuple(
        (min(lo for lo, _ in edges), max(hi for _, hi in edges))
        for edges in zip(*boxes, strict=True)
    )


def seal(root: Mapping[str, Any]) -> bytes:
    """Return the bytes of a root file that holds the contents ``root`` and their digest.

    The digest is that of ``root`` as JSON with sorted keys and without spaces.
    """
    return json.dumps(
        {"format": FORMAT, "xxh3": _seal(root), "root": root}, indent=1, allow_nan=False
    ).encode()


def unseal(data: bytes, name: str) -> dict[str, Any]:
    """Return the contents of a root file, after checking them against their digest.

    ``data``: bytes of the file; ``name``: the checkpoint, for error messages. Raises :class:`DamagedCheckpoint` if the
    digest does not match, or the file is of another format.
    """
    try:
        tree = json.loads(data)
        number = tree["format"]
        if number == FORMAT and _seal(tree["root"]) != tree["xxh3"]:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise DamagedCheckpoint(
            f"checkpoint {name} is damaged: {ROOT} cannot be read"
        ) from None
    if number != FORMAT:
        raise DamagedCheckpoint(
            f"{name} has checkpoint format {number}; this Weft reads format {FORMAT}"
        )
    return dict(tree["root"])


def _seal(root: Mapping[str, Any]) -> str:
    return checksum(json.dumps(root, sort_keys=True, separators=(",", ":")).encode())
