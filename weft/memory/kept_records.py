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
from weft.memory.tier_file import PIECE, TierFile, page_buffer, piece_size, whole_pages
from weft.paths import home_path

T = torch.Tensor

#: What the names of such files end with.
SUFFIX = ".weft-records"


class KeptRecords(NamedTuple):
    """An opened file of records, with a checksum of each piece of each record.

    Attributes:
        ``records``: the records.
        ``file``: their file.
        ``sums``: checksum of each piece of each record, int64 ``[records, pieces]``.
        ``lines``: lines for the user that say where the file is, and whether an earlier start wrote it.
    """

    records: Records
    file: TierFile
    sums: np.ndarray
    lines: list[str]


def keep_records(
    folder: Path, called: str, name: str, count: int, size: int, fill: Callable[[int, T], None],
    device: torch.device, compared: bool = True,
) -> KeptRecords:  # fmt: skip
    """Open the file of records ``name`` in ``folder``, or write it if there is none.

    ``called``: option that names the folder, for messages; ``name``: hash of the content; ``count``: number of records;
    ``size``: bytes of a record; ``fill``: writes the record with a given index into a uint8 buffer of zeros that has
    room for it; ``device``: where records are read to; ``compared``: whether reads of whole records are compared with
    their checksums here; if not, the caller compares them. Raises :class:`TierError` if the folder cannot be used, if
    the disk is full, or if the file does not have the size of its records.
    """
    path = home_path(folder) / f"{name}{SUFFIX}"
    total = count * whole_pages(size)
    begin = f"{total / 1e6:,.0f} MB of weights rest in {path}"
    if path.exists():
        begin += ", as an earlier start wrote them"
        return _opened(path, called, count, size, device, [begin], compared)
    file = TierFile(folder, called=called)
    records = Records(count, size, file, device)
    region, size = records.region, records.size
    assert region is not None
    buffer, rows = page_buffer(max(1, PIECE // size) * size), list[list[int]]()
    for first in range(0, count, len(buffer) // size):
        some = buffer[: (count - first) * size].zero_()
        for index, record in enumerate(some.split(size), first):
            fill(index, record)
            numbers = record.numpy().view(np.int64)
            pieces = range(0, size, piece_size(size))
            rows.append(
                [
                    int(numbers[at // 8 : (at + piece_size(size)) // 8].sum())
                    for at in pieces
                ]
            )
        region.write(some, first * size).wait()
    region.sums.clear()
    sums = np.array(rows, np.int64)
    stored = page_buffer(whole_pages(sums.nbytes))
    stored.zero_()
    stored.numpy()[: sums.nbytes] = sums.view(np.uint8).reshape(-1)
    file.region(stored.numel()).write(stored).wait()
    if not file.keep(path):
        said = f"{total / 1e6:,.0f} MB of weights rest in {folder} until the end: its file system keeps no such file"
        return _compared(KeptRecords(records, file, sums, [said]), compared)
    file.close()
    begin += ", where the next start will look for them"
    return _opened(path, called, count, size, device, [begin], compared)


def _opened(
    path: Path, called: str, count: int, size: int, device: torch.device, lines: list[str], compared: bool
) -> KeptRecords:  # fmt: skip
    """Open the file at ``path``, which has ``count`` records of ``size`` bytes."""
    file = TierFile(path.parent, called=called, kept=path)
    records = Records(count, size, file, device)
    pieces = -(-records.size // piece_size(records.size))
    sums = np.zeros((count, pieces), np.int64)
    region = file.region(whole_pages(sums.nbytes))
    if path.stat().st_size != file.size:
        raise TierError(
            f"{path} has {path.stat().st_size:,} bytes where {file.size:,} were written: it is damaged; remove it"
        )
    stored = page_buffer(region.size)
    region.read(stored).wait()
    sums.view(np.uint8).reshape(-1)[:] = stored.numpy()[: sums.nbytes]
    file.bytes.clear()
    kept = KeptRecords(records, file, sums, [*lines, *_beside(path)])
    return _compared(kept, compared)


def _compared(kept: KeptRecords, compared: bool) -> KeptRecords:
    """Let reads of whole records be compared with their checksums, if ``compared``."""
    region, size = kept.records.region, kept.records.size
    assert region is not None
    if compared:
        for record, sums in enumerate(kept.sums.tolist()):
            starts = range(record * size, (record + 1) * size, piece_size(size))
            region.sums.update(zip(starts, sums, strict=True))
    return kept


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
