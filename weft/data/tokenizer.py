"""Tokenizers: plain bytes, a Hugging Face ``tokenizer.json``, or a byte-level BPE trained on the corpus itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from weft.data.cache import build_once, cache_root, digest
from weft.data.corpora import documents, fingerprint
from weft.errors import UsageError, WeftError
from weft.recipe import Source

EOS = "<|endoftext|>"
_EOS_NAMES = (EOS, "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>", "<|eos|>", "[EOS]")

#: Training text of ``train:N``: at most this many characters, taken in pieces spread over the whole corpus.
_SAMPLE, _PIECE = 8_000_000, 8192


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back. ``vocab`` is one more than the largest id; ``eos`` ends every document."""

    vocab: int
    eos: int
    fingerprint: str
    _model: tokenizers.Tokenizer | None = field(default=None, repr=False, compare=False)

    def encode(self, text: str) -> np.ndarray:
        """int64 ids of ``text``, without ``eos``. The names of special tokens in ``text`` are plain text."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """:meth:`encode` for several texts, on all cores."""
        if self._model is None:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]
        encoded = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in encoded]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ``ids``; special tokens are left out, bytes that are not UTF-8 become U+FFFD."""
        ids = [int(i) for i in ids]
        if self._model is None:
            return bytes(i for i in ids if i < 256).decode(errors="replace")
        return self._model.decode(ids, skip_special_tokens=True)

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json`` (and the name of ``eos``), which :func:`load_tokenizer` and transformers read."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self._model is None:
            (folder / "tokenizer.json").write_text('{"kind": "bytes"}\n')
            return
        (folder / "tokenizer.json").write_text(self._model.to_str(), encoding="utf-8")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self._model.id_to_token(self.eos)}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_tokenizer(spec: str, sources: Sequence[Source] = (), cache: Path | None = None) -> Tokenizer:
    """The tokenizer that ``spec`` names: ``bytes``, ``train:N``, or a ``tokenizer.json`` or folder that holds one.

    ``sources`` are what ``train:N`` trains on, once per corpus; the result is kept in ``cache``.
    Raises :class:`UsageError` for a spec that cannot be, :class:`WeftError` for a file that cannot be read.
    """
    if spec == "bytes":
        return Tokenizer(257, 256, "bytes")
    kind, _, size = spec.partition(":")
    if kind == "train":
        return _trained(size, [s for s in sources if s.kind != "tokens"], cache_root(cache))
    path = Path(spec).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise WeftError(f"tokenizer {spec!r}: {path} does not exist; use 'bytes', 'train:N' or a tokenizer.json")
    try:
        text = path.read_text(encoding="utf-8")
        if json.loads(text) == {"kind": "bytes"}:
            return load_tokenizer("bytes")
        model = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise WeftError(f"{path} is not a tokenizer.json: {str(error).splitlines()[0]}") from None
    model.no_padding()
    model.no_truncation()
    model.encode_special_tokens = True  # "<|endoftext|>" within a document must not end it
    ids = model.get_vocab(with_added_tokens=True)
    names = [name for name in (_configured_eos(path.parent), *_EOS_NAMES) if name in ids]
    if not names:
        raise WeftError(
            f"{path} has no end-of-document token; name one as 'eos_token' in tokenizer_config.json beside it"
        )
    eos = ids[names[0]]
    return Tokenizer(max(ids.values()) + 1, eos, digest(model.to_str(), eos), model)


def _configured_eos(folder: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            try:
                token = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token")
            except (ValueError, AttributeError):
                raise WeftError(f"{folder / name} is not a JSON object") from None
            if token:
                return str(token["content"] if isinstance(token, dict) else token)
    return None


def _trained(size: str, sources: Sequence[Source], root: Path) -> Tokenizer:
    if not size.isdecimal() or int(size) < 257:
        raise UsageError(f"tokenizer 'train:{size}': N must be a number of at least 257 (256 bytes and {EOS})")
    if not sources:
        raise UsageError("tokenizer 'train:N' needs a source of text; for pre-tokenized sources name their tokenizer")

    def train(folder: Path) -> None:
        model = tokenizers.Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=int(size),
            special_tokens=[EOS],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        model.train_from_iterator(sample(sources), trainer)
        model.save(str(folder / "tokenizer.json"))

    name = f"tokenizer-{digest(size, _SAMPLE, _PIECE, [fingerprint(s) for s in sources])}"
    return load_tokenizer(str(build_once(root / name, train)))


def sample(sources: Sequence[Source], size: int = _SAMPLE) -> list[str]:
    """At most ``size`` characters of text, as pieces evenly spaced over all documents, in one pass."""
    kept: list[str] = []
    held, stride = 0, 1
    for number, piece in enumerate(_pieces(sources)):
        if number % stride == 0:
            kept.append(piece)
            held += len(piece)
        while held > size and len(kept) > 1:  # too much: from now on (and so far) only every other piece
            kept, stride = kept[::2], stride * 2
            held = sum(map(len, kept))
    return kept


def _pieces(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources:
        for text in documents(source):
            yield from (text[at : at + _PIECE] for at in range(0, len(text), _PIECE))
