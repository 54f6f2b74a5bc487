"""Records in a file that is named after its content, so that the next start finds it and writes nothing.

The file gets its name when all of it is on the disk. A process that is ended while it writes therefore leaves nothing
behind. Checksums of all records stand at the end of the file, and reads are compared with them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from weft.memory.nameless_file import TierError
from weft.memory.records import Records
from weft.memory.tier_file import TierFile, page_buffer, piece_size, whole_pages

T = torch.Tensor

#: What the names of such files end with.
SUFFIX = ".weft-records"


class KeptRecords(NamedTuple):
    """Records in a file, and what is known of them.

    Attributes:
        ``records``: the records.
        ``file``: their file.
        ``sums``: checksum of each piece of each record, int64 ``[records, pieces]``.
        ``lines``: what the user is told about the file.
    """

    records: Records
    file: TierFile
    sums: np.ndarray
    lines: list[str]


def keep_records(
    folder: Path, called: str, name: str, count: int, size: int, fill: Callable[[int, T], None],
    device: torch.device,
) -> KeptRecords:  # fmt: skip
    """Open the file of records ``name`` in ``folder``, or write it if there is none.

    ``called``: option that names the folder, for messages; ``name``: hash of the content; ``count``: number of records;
    ``size``: bytes of a record; ``fill``: writes a record, given by its number, into a uint8 buffer of zeros that has
    room for it; ``device``: where records are read to. Raises :class:`TierError` if the folder cannot be used, if the
    disk is full, or if the file does not have the size of its records.
    """
    path = folder.expanduser() / f"{name}{SUFFIX}"
    total = count * whole_pages(size)
    begin = f"{total / 1e6:,.0f} MB of weights rest in {path}"
    if path.exists():
        begin += ", as an earlier start wrote them"
        return _opened(path, called, count, size, device, [begin])
    file = TierFile(folder, called=called)
    records = Records(count, size, file, device)
    buffer = page_buffer(records.size)
    for index in range(count):
        buffer.zero_()
        fill(index, buffer)
        records.write(index, buffer)
    assert records.region is not None
    starts = piece_starts(count, records.size)
    sums = np.array([[records.region.sums[s] for s in row] for row in starts], np.int64)
    stored = page_buffer(whole_pages(sums.nbytes))
    stored.zero_()
    stored.numpy()[: sums.nbytes] = sums.view(np.uint8).reshape(-1)
    file.region(stored.numel()).write(stored).wait()
    if not file.keep(path):
        said = f"{total / 1e6:,.0f} MB of weights rest in {folder} until the end: its file system keeps no such file"
        return KeptRecords(records, file, sums, [said])
    file.close()
    begin += ", where the next start will look for them"
    return _opened(path, called, count, size, device, [begin])


def _opened(
    path: Path, called: str, count: int, size: int, device: torch.device, lines: list[str]
) -> KeptRecords:  # fmt: skip
    """Open the file at ``path``, which has ``count`` records of ``size`` bytes."""
    file = TierFile(path.parent, called=called, kept=path)
    records = Records(count, size, file, device)
    starts = piece_starts(count, records.size)
    sums = np.zeros((count, len(starts[0])), np.int64)
    region = file.region(whole_pages(sums.nbytes))
    if path.stat().st_size != file.size:
        raise TierError(
            f"{path} has {path.stat().st_size:,} bytes where {file.size:,} were written: it is damaged; remove it"
        )
    stored = page_buffer(region.size)
    region.read(stored).wait()
    sums.view(np.uint8).reshape(-1)[:] = stored.numpy()[: sums.nbytes]
    assert records.region is not None
    for row, known in zip(starts, sums.tolist(), strict=True):
        records.region.sums.update(zip(row, known, strict=True))
    file.bytes.clear()
    return KeptRecords(records, file, sums, [*lines, *_beside(path)])


def piece_starts(count: int, size: int) -> list[range]:
    """Return, for each of ``count`` records of ``size`` bytes, the bytes of the file at which its pieces begin."""
    piece = piece_size(size)
    return [range(i * size, (i + 1) * size, piece) for i in range(count)]


def _beside(path: Path) -> list[str]:
    """Return a line about other such files in the folder of ``path``, whose room nobody may need any more."""
    kind = path.name.split("-")[0]
    others = [p.stat().st_size for p in path.parent.glob(f"{kind}-*{SUFFIX}") if p != path]  # fmt: skip
    if not others:
        return []
    return [
        f"{path.parent} also keeps {len(others)} such file{'s' * (len(others) > 1)} of other weights or other ranks, "
        f"{sum(others) / 1e6:,.0f} MB; remove {'them' if len(others) > 1 else 'it'} if no model needs "
        f"{'them' if len(others) > 1 else 'it'}"
    ]
