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
    """Interface of an operator that makes new documents from documents: it may change, split, add or leave out
    documents.

    The result for a document must be a pure function of this document and of the operator's settings. It then does not
    depend on shards and workers.

    A mapper that may fail to make some documents without failing as a whole has a method ``missing``. It returns a
    :class:`MissingDocument` for each document that it failed to make since the last call. The run counts them, and
    names the first.
    """

    def map(self, documents: Documents) -> Documents:
        """Return the new documents.

        The id of a document that is made from another begins with that id, as in "a.txt#2".
        """
        ...


class MissingDocument(NamedTuple):
    """A document that a mapper could not make.

    Attributes:
        ``source``: id of the document from which it was to be made.
        ``reason``: description of the missing part and its cause.
    """

    source: str
    reason: str


@runtime_checkable
class Filter(Protocol):
    """Interface of an operator that keeps some documents, by statistics of each document.

    Statistics are columns. They are computed once and stored with the documents, so that a new threshold does not need
    them to be computed again.

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
    """Interface of an operator that must see all documents at once: a deduplicator, a grouper or a selector.

    It works in two passes: a summary of each shard, in parallel, and one decision over all summaries.

    Attributes:
        ``late``: names of the settings that only :meth:`decide` reads. Changing them leaves summaries valid.
    """

    late: tuple[str, ...]

    def summarize(self, documents: Documents) -> dict[str, np.ndarray]:
        """Return all that :meth:`decide` needs of the documents, as arrays by name whose first dimension counts the
        documents.

        Rows of variable length are given as two arrays: ``NAME`` with all values, and ``NAME_offsets`` with the start
        of each row and the end of the last one.
        """
        ...

    def decide(
        self,
        ids: Sequence[Sequence[str]],
        summaries: Sequence[Mapping[str, np.ndarray]],
    ) -> list[Decision]:
        """Return the decision about the documents of every shard.

        ``ids``: ids of the documents of every shard. ``summaries``: the summary of every shard, from :meth:`summarize`.
        The decision about a document must not depend on how the documents are distributed over shards: ties are broken
        by ids.
        """
        ...


#: What a step applies. It may have a method ``fingerprint``, which returns a text that changes with the files that its
#: settings name, and a method ``notes``, which returns lines for the user about what it leaves out. The notes of a
#: :class:`Joint` are about its last decision, and are kept with it.
Operator = Mapper | Filter | Joint
