"""Rephrase documents: passages in several styles, by a generator, each text written once (Maini et al. 2024, WRAP)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from weft.cache import digest
from weft.curation.documents import Documents
from weft.curation.passages import CutDocument, cut_document, without_half_sentence
from weft.curation.rephrase_styles import TEXT
from weft.curation.text_generator import PromptToWrite, TextGenerator, WritingSettings
from weft.curation.text_store import KeptText, TextStore
from weft.encodable import encodable

#: Columns that say where a document comes from: the id of the document that was rephrased, the style, and a hash of
#: generator, prompt and settings. Of a document that was not made by rephrasing they are "".
SOURCE, STYLE, GENERATOR = "rephrased_from", "rephrase_style", "rephrased_by"
#: Column with the number of passages that were cut off at the largest number of tokens.
CUT = "rephrase_cut"
#: Column that says of a document that was to be rephrased which styles failed, and why; "" if none did.
FAILED = "rephrase_failed"
_PROVENANCE = {SOURCE: "", STYLE: "", GENERATOR: "", CUT: 0, FAILED: ""}


@dataclass(frozen=True)
class RephrasePlan:
    """Plan of rephrasing: the styles with their prompts, and the settings of the generator.

    Attributes:
        ``prompts``: prompt of each style by its name.
        ``writing``: settings of the generator.
        ``passage``: largest number of tokens of a passage.
        ``seed``: seed of sampling.
        ``keep``: whether the original documents are kept beside the rephrased ones.
    """

    prompts: Mapping[str, str]
    writing: WritingSettings
    passage: int
    seed: int
    keep: bool

    def identity(self, style: str, generator: str) -> str:
        """Return a hash of everything but the passage that determines a text of ``style``: generator, prompt, settings
        and seed.

        ``generator``: digest of the generator.
        """
        seed = self.seed if self.writing.temperature else 0
        return digest(generator, self.prompts[style], astuple(self.writing), seed)


class RephraseFailure(NamedTuple):
    """A document that could not be rephrased in a style.

    Attributes:
        ``id``: id of the document.
        ``style``: name of the style.
        ``reason``: cause of the failure, in words.
    """

    id: str
    style: str
    reason: str


class Rephrased(NamedTuple):
    """Result of rephrasing the documents of a shard.

    Attributes:
        ``documents``: the rephrased documents, each behind the document from which it was generated if that is kept.
        ``failures``: documents that could not be rephrased in a style.
        ``written``: number of texts that the generator has written now, rather than found in the store.
    """

    documents: Documents
    failures: list[RephraseFailure]
    written: int


class _Wanted(NamedTuple):
    """A text that is wanted: its key, the style and the passage."""

    key: bytes
    style: str
    passage: str


def rephrase(
    documents: Documents, plan: RephrasePlan, generator: TextGenerator, store: TextStore
) -> Rephrased:
    """Rephrase each of ``documents`` in all styles of ``plan``.

    Documents that an earlier step has generated are passed on unchanged. Texts that are in ``store`` are not written
    again, and each text that ``generator`` writes is stored at once. The result for a document depends on the document,
    the plan and the generator alone. Raises :class:`weft.errors.WeftError` if the generator fails.
    """
    made_by = generator.digest()
    identities = {style: plan.identity(style, made_by) for style in plan.prompts}
    synthetic = documents.columns.get(GENERATOR, [""] * len(documents))
    cuts = [
        None if of else cut_document(text, plan.passage, generator.count)
        for text, of in zip(map(encodable, documents.texts), synthetic, strict=True)
    ]
    wanted = list(dict.fromkeys(_wanted(cuts, identities)))
    kept = store.get(each.key for each in wanted)
    missing = [each for each in wanted if each.key not in kept]
    failed = dict[bytes, str]()

    def prompts() -> Iterator[PromptToWrite]:
        for number, (key, style, passage) in enumerate(missing):
            prompt = plan.prompts[style].replace(TEXT, passage)
            # of the passage and not of the place, so that equal passages are written once
            seed = int.from_bytes(key[:4], "little") >> 1
            yield PromptToWrite(number, prompt, passage, seed)

    for number, text, cut, reason in generator.write(prompts(), plan.writing):
        key = missing[number].key
        if reason:  # a later run may try again
            failed[key] = reason
            continue
        store.put(key, text, cut)
        kept[key] = KeptText(text, cut)
    rows, failures = list[_Row](), list[RephraseFailure]()
    for row, cut_up in zip(_rows_of(documents), cuts, strict=True):
        if cut_up is None:
            rows.append(row)
            continue
        new, wrong = _restyled(row, cut_up, identities, kept, failed)
        said = [f"{each.style}: {each.reason}" for each in wrong]
        earlier = [row.columns[FAILED]] if row.columns[FAILED] else []
        row.columns[FAILED] = "; ".join(earlier + said)
        rows += [row] * plan.keep + new
        failures += wrong
    names = list(dict.fromkeys([*documents.columns, *_PROVENANCE]))
    together = Documents(
        [row.id for row in rows],
        [row.text for row in rows],
        {name: [row.columns[name] for row in rows] for name in names},
    )
    return Rephrased(together, failures, len(missing) - len(failed))


class _Row(NamedTuple):
    """A document: its id, its text, and its columns by name."""

    id: str
    text: str
    columns: dict[str, Any]


def _rows_of(documents: Documents) -> Iterator[_Row]:
    """Yield the documents, with columns of provenance where they have none yet."""
    for i, (name, text) in enumerate(zip(documents.ids, documents.texts, strict=True)):
        own = {column: values[i] for column, values in documents.columns.items()}
        yield _Row(name, text, _PROVENANCE | own)


def _wanted(
    cuts: list[CutDocument | None], identities: Mapping[str, str]
) -> Iterator[_Wanted]:
    for cut_up in cuts:
        for passage in cut_up.passages if cut_up is not None else ():
            for style, identity in identities.items():
                yield _Wanted(_key(identity, passage.text), style, passage.text)


def _key(identity: str, passage: str) -> bytes:
    """Return the key of the text that is made from ``passage``."""
    return blake2b(f"{identity} {passage}".encode(), digest_size=16).digest()


class _Restyled(NamedTuple):
    """The documents that were made from one, and the styles that failed."""

    rows: list[_Row]
    failures: list[RephraseFailure]


def _restyled(
    row: _Row,
    cut_up: CutDocument,
    identities: Mapping[str, str],
    kept: Mapping[bytes, KeptText],
    failed: Mapping[bytes, str],
) -> _Restyled:
    """Join the texts of the passages of the document ``row``, in every style."""
    rows, failures = list[_Row](), list[RephraseFailure]()
    for style, identity in identities.items():
        keys = [_key(identity, passage.text) for passage in cut_up.passages]
        parts = [kept.get(key, KeptText("", False)) for key in keys]
        texts = [_whole(part) for part in parts]
        if "" in texts or not texts:
            at = texts.index("") if texts else 0
            why = failed.get(keys[at], "nothing was written") if keys else "no text"
            of = f"passage {at + 1} of {len(keys)}: " if len(keys) > 1 else ""
            failures.append(RephraseFailure(row.id, style, of + why))
            continue
        about = {
            SOURCE: row.id,
            STYLE: style,
            GENERATOR: identity,
            CUT: sum(part.cut for part in parts),
            FAILED: "",
        }
        # ids differ where another step rephrases with another generator
        name = f"{row.id}#{style}-{identity[:8]}"
        rows.append(_Row(name, cut_up.join(texts), row.columns | about))
    return _Restyled(rows, failures)


def _whole(part: KeptText) -> str:
    """Return a text without white space at its ends, and without half a sentence if it was cut off."""
    return (without_half_sentence(part.text) if part.cut else part.text).strip()
