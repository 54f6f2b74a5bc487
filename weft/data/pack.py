"""Rows of whole documents, as full as they can be made."""

from bisect import bisect_left, insort

import numpy as np


def packed(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents of ``lengths`` (none above ``capacity``) in rows of at most ``capacity`` tokens.

    The longest first, each goes into the fullest row with room for it (best fit decreasing; Johnson et al. 1974: rows
    are at most 11/9 of the fewest possible, and 1 more). Returns the documents in the order of the rows, and how many
    of them there are up to the end of each row: int64 ``[documents]`` and ``[rows]``.
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of by_room, sorted
    for document in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[document])
        at = bisect_left(rooms, size)
        if at == len(rooms):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room = rooms[at]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        rows[row].append(document)
        if left := room - size:
            if left not in by_room:
                insort(rooms, left)
            by_room.setdefault(left, []).append(row)
    order = np.array([document for row in rows for document in row], np.int64)
    return order, np.cumsum([len(row) for row in rows], dtype=np.int64)
