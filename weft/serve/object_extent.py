"""Finds where a JSON object ends in a text that comes in pieces, and looks at each character only once."""

import re

#: What counts outside and inside of the strings of JSON.
_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')


class ObjectExtent:
    """Finds the end of a JSON object whose text comes in pieces.

    Only brackets and strings are followed, so the text between the object's braces need not be valid JSON. If it is
    not, then no longer text can make it valid either.

    Attributes:
        ``length``: number of characters that have been looked at. They end with the object.
        ``complete``: whether the object has ended.
    """

    def __init__(self) -> None:
        self.length = 0
        self.complete = False
        self._depth = 0
        self._quoted = self._escaped = False

    def add(self, piece: str) -> int:
        """Look at ``piece``, the next part of the text, which begins with the object's brace if it is the first.
        Return how many of its characters belong to the object.
        """
        if self.complete:
            return 0
        at = 1 if self._escaped and piece else 0
        self._escaped = self._escaped and not piece
        while mark := (_INSIDE if self._quoted else _OUTSIDE).search(piece, at):
            at = mark.end()
            sign = mark[0]
            if sign == "\\":
                self._escaped = at == len(piece)
                at += 1
            elif sign == '"':
                self._quoted = not self._quoted
            else:
                self._depth += 1 if sign in "{[" else -1
                if self._depth == 0:
                    self.complete = True
                    self.length += at
                    return at
        self.length += len(piece)
        return len(piece)
