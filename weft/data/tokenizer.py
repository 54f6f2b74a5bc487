"""Tokenizers: plain bytes, a Hugging Face ``tokenizer.json``, or a byte-level BPE trained on the corpus itself."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from weft.cache import build_once, cache_root, digest
from weft.data.corpora import read_documents, source_fingerprint
from weft.encodable import encodable
from weft.errors import UsageError, WeftError
from weft.paths import home_path
from weft.recipe.named_templates import (
    CONFIG_FILE,
    DEFAULT,
    TEMPLATE_FILE,
    listed,
    templates_of,
    with_named_templates,
)
from weft.shapes.carried_files import GENERATION, as_json

if TYPE_CHECKING:
    from weft.recipe import Source

_EOS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>", "[EOS]")

#: The file that says why there is no tokenizer, where there should be one.
NO_TOKENIZER = "no-tokenizer.txt"

#: Training text of ``train:N``: at most this many characters, in pieces spread over the whole corpus.
_SAMPLE, _PIECE = 8_000_000, 8192


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer with its special tokens and chat templates.

    Attributes:
        ``vocab``: the largest id plus 1.
        ``eos``: id of the token that ends every document, None without such a token.
        ``fingerprint``: digest that changes whenever a text gets other ids.
        ``model``: the tokenizer of Hugging Face's ``tokenizers``, None for plain bytes.
        ``bos``: id of the token that begins a text, None without such a token.
        ``pad``: id of the token that fills a row, None without such a token.
        ``chat_template``: the Jinja template that writes a conversation as text (:mod:`weft.data.chat`); None without
            one.
        ``ends``: ids at which generation ends, as ``generation_config.json`` gives them.
        ``named_templates``: other chat templates by name, of which ``tool_use`` is for conversations with tools.
        ``named``: names of special tokens as chat templates know them, such as ``unk_token``.
    """

    vocab: int
    eos: int | None
    fingerprint: str
    model: tokenizers.Tokenizer | None = field(default=None, repr=False, compare=False)
    bos: int | None = None
    pad: int | None = None
    chat_template: str | None = field(default=None, repr=False, compare=False)
    ends: tuple[int, ...] = field(default=(), compare=False)
    named_templates: Mapping[str, str] = field(
        default_factory=dict, repr=False, compare=False
    )
    named: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def stops(self) -> tuple[int, ...]:
        """Ids at which generated text ends: those of ``generation_config.json``, or ``eos`` if the file has none."""
        return self.ends or (() if self.eos is None else (self.eos,))

    @property
    def closing(self) -> int:
        """Id that ends a training document. Raises :class:`WeftError` if there is none."""
        if self.eos is None:
            raise WeftError(
                "the tokenizer has no end-of-document token; name one as 'eos_token' in tokenizer_config.json beside it"
            )
        return self.eos

    @cached_property
    def specials(self) -> dict[str, int]:
        """Ids of the special tokens by name.

        Chat templates write these names; in plain text they are ordinary characters.
        """
        if self.model is None:
            return {_EOS[0]: self.closing}
        return {
            token.content: i
            for i, token in self.model.get_added_tokens_decoder().items()
            if token.special
        }

    def name_of(self, token: int | None) -> str | None:
        """Return the name of token id ``token``, such as ``<|im_end|>``, or None if the id has no name."""
        if self.model is None:
            return _EOS[0] if token == self.eos else None
        # the library's own answer is the name after normalization, such as "\u2581<s>"
        added = self._added.get(-1 if token is None else token)
        return added or (None if token is None else self.model.id_to_token(token))

    @cached_property
    def _added(self) -> dict[int, str]:
        """Names of the added tokens by id."""
        if self.model is None:
            return {}
        return {i: t.content for i, t in self.model.get_added_tokens_decoder().items()}

    @property
    def template_tokens(self) -> dict[str, str]:
        """Names of special tokens by what chat templates call them, such as ``eos_token``."""
        own = {
            f"{kind}_token": self.name_of(getattr(self, kind))
            for kind in ("eos", "bos", "pad")
        }
        given = {key: name for key, name in own.items() if name is not None}
        return given | {k: name for k, name in self.named.items() if k not in own}

    def encode(self, text: str, special: bool = False) -> np.ndarray:
        """Return the int64 ids of ``text``, without ``eos``.

        Names of special tokens in ``text`` are encoded as plain text, or with ``special`` as the special tokens.
        """
        return self.encode_many([text], special)[0]

    def encode_many(self, texts: list[str], special: bool = False) -> list[np.ndarray]:
        """Encode several texts in parallel on all cores, each as :meth:`encode` does with the same ``special``."""
        # a command line may have bytes that are no UTF-8
        texts = [encodable(text) for text in texts]
        if self.model is None:
            return [self._bytes_of(text, special) for text in texts]
        self.model.encode_special_tokens = not special
        encoded = self.model.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encoded]

    def _bytes_of(self, text: str, special: bool) -> np.ndarray:
        parts = [
            np.frombuffer(part.encode(), np.uint8)
            for part in (text.split(_EOS[0]) if special else [text])
        ]
        return np.concatenate(
            [x for part in parts for x in ([self.closing], part)][1:], dtype=np.int64
        )

    def prompt_ids(
        self, text: str, special: bool = False, opened: bool = True
    ) -> list[int]:
        """Return the ids of a prompt: :attr:`opening`, unless ``opened`` is false, and the text; ``eos`` alone if there
        are none. With ``special``, names of special tokens in ``text`` become these tokens.
        """
        opening = self.opening if opened else []
        return opening + [int(i) for i in self.encode(text, special)] or [self.closing]

    @cached_property
    def opening(self) -> list[int]:
        """Ids that the tokenizer writes before a text, such as the BOS token's; empty if it writes none."""
        if self.model is None:
            return []
        shown = self.model.encode("a", add_special_tokens=True)
        if 0 in shown.special_tokens_mask:
            return list(shown.ids[: shown.special_tokens_mask.index(0)])
        # it has no token for such a text
        return [i for i in shown.ids if i != self.eos or i == self.bos]

    def has_ids_of(self, other: Tokenizer) -> bool:
        """Return whether every id means the same text in this tokenizer and in ``other``.

        The ids that begin a text, :attr:`opening`, may differ.
        """
        return self.fingerprint == other.fingerprint or self._meaning == other._meaning

    @cached_property
    def _meaning(self) -> str:
        if self.model is None:
            return self.fingerprint
        return digest(
            json.loads(self.model.to_str()) | {"post_processor": None}, self.eos
        )

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ``ids``, without special tokens; invalid UTF-8 becomes U+FFFD."""
        if self.model is None:
            return bytes(int(i) for i in ids if i < 256).decode(errors="replace")
        return self.model.decode([int(i) for i in ids], skip_special_tokens=True)

    def files(self) -> dict[str, bytes]:
        """Return the tokenizer as files that :func:`load_tokenizer` and transformers read: contents by file name."""
        template = (
            {TEMPLATE_FILE: self.chat_template.encode()} if self.chat_template else {}
        )
        several: dict[str, Any] = {}
        if self.named_templates:
            default = {DEFAULT: self.chat_template} if self.chat_template else {}
            template, several = (
                {},
                {"chat_template": listed(default | dict(self.named_templates))},
            )
        if self.model is None:
            config_file = {CONFIG_FILE: as_json(several)} if several else {}
            return {"tokenizer.json": b'{"kind": "bytes"}\n'} | config_file | template
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        tokens = {
            "eos_token_id": list(self.stops) or None,
            "bos_token_id": self.bos,
            "pad_token_id": self.pad,
        }
        return {
            "tokenizer.json": self.model.to_str().encode(),
            CONFIG_FILE: as_json(config | self.template_tokens | several),
            GENERATION: as_json(
                {key: value for key, value in tokens.items() if value is not None}
            ),
        } | template

    def save(self, folder: str | Path) -> None:
        """Write the files of the tokenizer (:meth:`files`) into ``folder``, which :func:`load_tokenizer` and
        transformers read.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            (Path(folder) / name).write_bytes(content)


def load_tokenizer(
    spec: str, sources: Sequence[Source] = (), cache: Path | None = None
) -> Tokenizer:
    """Load the tokenizer ``spec``: ``bytes``, ``train:N``, a ``tokenizer.json``, or a folder that holds one.

    ``train:N`` trains a byte-level BPE of N entries on the texts of ``sources`` on first use, and keeps it in the cache
    folder ``cache``. Raises :class:`WeftError` for a missing or damaged tokenizer.
    """
    if spec in ("", "bytes"):
        return Tokenizer(257, 256, "bytes")
    if spec.startswith("train:"):
        spec = str(
            _trained(
                spec,
                [source for source in sources if source.kind != "tokens"],
                cache_root(cache),
            )
        )
    path = home_path(spec)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise WeftError(
            f"tokenizer {spec!r}: no file {path}; use 'bytes', 'train:N' or a tokenizer.json"
        )
    beside = {
        name: path.with_name(name) for name in (CONFIG_FILE, TEMPLATE_FILE, GENERATION)
    }
    files = {name: file.read_bytes() for name, file in beside.items() if file.is_file()}
    files = with_named_templates(files, path.parent)
    return tokenizer_from_files(
        {"tokenizer.json": path.read_bytes()} | files, str(path)
    )


def tokenizer_from_files(files: Mapping[str, bytes], origin: str) -> Tokenizer:
    """Build a tokenizer from ``files``, the contents of a tokenizer's folder by file name.

    ``origin``: what errors call the folder.
    """
    if "tokenizer.json" not in files:
        reason = (
            "it has a tokenizer.model, of sentencepiece"
            if "tokenizer.model" in files
            else "it has none"
        )
        said = files[NO_TOKENIZER].decode() if NO_TOKENIZER in files else reason
        raise WeftError(
            f"{origin} has no tokenizer.json ({said}); name a tokenizer that is the model's own"
        )
    # tokenizers that a run trains or that read bytes need nothing of it
    from weft.data.tokenizer_config import named_tokens, with_configured_tokens

    try:
        settings = json.loads(files.get(CONFIG_FILE, b"{}"))
        named = {
            kind: _name(settings.get(f"{kind}_token")) for kind in ("eos", "bos", "pad")
        }
        templates = templates_of(settings, files.get(TEMPLATE_FILE))
        named_templates = {k: templates[k] for k in templates if k != DEFAULT}
        template = templates.get(DEFAULT)
        text = files["tokenizer.json"].decode()
        if json.loads(text) == {"kind": "bytes"}:
            return replace(
                load_tokenizer("bytes"),
                chat_template=template,
                named_templates=named_templates,
            )
        model = with_configured_tokens(
            tokenizers.Tokenizer.from_str(text), settings, templates.values()
        )
        given = json.loads(files.get(GENERATION, b"{}")).get("eos_token_id")
    except Exception as error:  # the library raises nothing narrower
        raise WeftError(
            f"{origin} or its tokenizer_config.json is damaged: {(str(error).splitlines() or [''])[0]}"
        ) from None
    model.no_padding()
    model.no_truncation()
    # "<|endoftext|>" within a document must not end it
    model.encode_special_tokens = True
    ids = model.get_vocab(with_added_tokens=True)
    size = max(ids.values()) + 1
    ends = tuple(
        i
        for i in (given if isinstance(given, list) else [given])
        if isinstance(i, int) and i < size
    )
    eos = next(
        (ids[name] for name in (named["eos"], *_EOS) if name in ids),
        ends[0] if ends else None,
    )
    bos, pad = (ids.get(named[kind] or "") for kind in ("bos", "pad"))
    return Tokenizer(
        size,
        eos,
        digest(model.to_str(), eos),
        model,
        bos,
        pad,
        template,
        ends,
        named_templates,
        named_tokens(model, settings),
    )


def _name(token: str | dict[str, str] | None) -> str | None:
    """Return the name of a token as ``tokenizer_config.json`` has it: a text, or an object with the text and
    its flags.
    """
    return token["content"] if isinstance(token, dict) else token


#: Entries that are trained at most; far above, the trainer asks for more memory than there is, and aborts.
LARGEST = 2**24


def _trained(spec: str, sources: Sequence[Source], root: Path) -> Path:
    """Folder of the byte-level BPE (Sennrich et al. 2016, Radford et al. 2019) trained on ``sources``."""
    size = spec.removeprefix("train:")
    if not size.isdecimal() or not 257 <= int(size) <= LARGEST:
        raise UsageError(
            f"tokenizer {spec!r}: N must be a number of 257 (256 bytes and {_EOS[0]}) to {LARGEST}"
        )
    if not sources:
        raise UsageError(
            f"tokenizer {spec!r} needs a source of text; name the tokenizer that made the 'tokens'"
        )

    def train(folder: Path) -> None:
        model = tokenizers.ByteLevelBPETokenizer()
        model.train_from_iterator(
            sample_text(sources),
            int(size),
            1,
            show_progress=False,
            special_tokens=[_EOS[0]],
        )
        model.save(str(folder / "tokenizer.json"))

    key = digest(
        size, _SAMPLE, _PIECE, [source_fingerprint(source) for source in sources]
    )
    return build_once(root / f"tokenizer-{key}", train)


def sample_text(sources: Sequence[Source], size: int = _SAMPLE) -> list[str]:
    """Return at most ``size`` characters of the sources' text, as pieces evenly spaced over all documents.

    The documents are read once.
    """
    kept: list[str] = []
    held, stride = 0, 1
    texts = (text for source in sources for text in read_documents(source))
    pieces = (
        text[at : at + _PIECE] for text in texts for at in range(0, len(text), _PIECE)
    )
    for number, piece in enumerate(pieces):
        if number % stride == 0:
            kept.append(piece)
            held += len(piece)
        # too much: from now on, and so far, only every other piece
        if held > size and len(kept) > 1:
            kept, stride = kept[::2], 2 * stride
            held = sum(map(len, kept))
    return kept
