"""What an operator of a data pipeline is: a mapper, a filter, or one that must see all documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from weft.curation.documents import Documents
from weft.errors import WeftError


class OperatorFailed(WeftError):
    """Raised by an operator that cannot process any document, for example because its server is gone.

    The run ends with this error. An error of any other class counts as an error of single documents.
    """


@runtime_checkable
class Mapper(Protocol):
    """Operator that makes documents from documents: it may change, split, add or leave out documents.

    The result must be a pure function of the documents and of the operator's settings, document by document, so that it
    does not depend on shards and workers.

    A mapper that may fail to make some documents, and goes on, has a method ``missing``. It returns a
    :class:`MissingDocument` for each document that it failed to make since the last call. The run counts these, and
    names the first.
    """

    def map(self, documents: Documents) -> Documents:
        """Return the new documents. An id that is made from another one begins with it, as in "a.txt#2"."""
        ...


class MissingDocument(NamedTuple):
    """A document that a mapper could not make.

    Attributes:
        ``source``: id of the document from which it was to be made.
        ``reason``: what is missing, and why.
    """

    source: str
    reason: str


@runtime_checkable
class Filter(Protocol):
    """Operator that keeps some documents, by statistics of each document.

    Statistics are columns. They are computed once and kept beside the documents, so a new threshold costs no new pass.

    Attributes:
        ``late``: names of the settings that only :meth:`reasons` reads. Changing them leaves statistics valid.
    """

    late: tuple[str, ...]

    def statistics(self, documents: Documents) -> dict[str, list[Any]]:
        """Return the statistics of each document by name of the column."""
        ...

    def reasons(self, columns: Mapping[str, Sequence[Any]]) -> list[str]:
        """Return why each document is dropped, as a short text such as "fewer than 50 words"; "" if it is kept.

        ``columns``: the document's columns by name, with those of :meth:`statistics`.
        """
        ...


class Decision(NamedTuple):
    """Decision of a joint operator about the documents of one shard.

    ``columns``: new columns of the documents. ``reasons``: why each document is dropped; "" for those that are kept.
    """

    columns: dict[str, list[Any]]
    reasons: list[str]


@runtime_checkable
class Joint(Protocol):
    """Operator that must see all documents: a deduplicator, a grouper or a selector.

    It works in two passes: a summary of each shard, in parallel, and one decision over all summaries.

    Attributes:
        ``late``: names of the settings that only :meth:`decide` reads. Changing them leaves summaries valid.
    """

    late: tuple[str, ...]

    def summarize(self, documents: Documents) -> dict[str, np.ndarray]:
        """Return arrays whose first dimension counts the documents: all that :meth:`decide` needs of them.

        Arrays of variable length stand as one array of all values and one of offsets, whose name ends in "_offsets".
        """
        ...

    def decide(
        self,
        ids: Sequence[Sequence[str]],
        summaries: Sequence[Mapping[str, np.ndarray]],
    ) -> list[Decision]:
        """Return the decision for every shard.

        ``ids``: ids of the documents of every shard; ``summaries``: its summary. The decision about a document must not
        depend on how the documents are distributed over shards: ties are broken by ids.
        """
        ...


#: What a step applies. It may have a method ``fingerprint``, which returns a text that changes with the files that its
#: settings name, and a method ``notes``, which returns lines for the user about what it leaves out. The notes of a
#: :class:`Joint` are about its last decision, and are kept with it.
Operator = Mapper | Filter | Joint
