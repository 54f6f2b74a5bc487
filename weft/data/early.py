"""A look at the first records of every source, before a model is read or ranks are started."""

from itertools import islice

from weft.data.chat.samples import samples
from weft.data.corpora import documents
from weft.data.files import files
from weft.errors import WeftError
from weft.recipe import SOURCES, Data, Source

#: Records of each source that are looked at.
FIRST = 16


def check_sources(data: Data) -> None:
    """Raise :class:`WeftError` for a source that is not there, is of another kind, is empty or begins with an error.

    Plugins' data sets are not asked, as they may take their time.
    """
    for source in data.sources:
        if source.kind in SOURCES and (source.kind, source.path) != ("stdlib", None):
            _check(source)


def _check(source: Source) -> None:
    if source.kind == "tokens":
        files(source)
        return
    chats = source.kind in ("chat", "preference")
    first = [*islice(samples(source) if chats else documents(source), FIRST)]
    if not any(first):
        what = "conversation" if source.kind == "chat" else "pair of answers" if chats else "document"
        raise WeftError(f"data source {source.path} holds no {what}; check where it comes from")
