"""Tokenizers: plain bytes, a Hugging Face ``tokenizer.json``, or a byte-level BPE trained on the corpus itself."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tokenizers

from weft.data.cache import build_once, cache_root, digest
from weft.data.corpora import documents, fingerprint
from weft.errors import UsageError, WeftError
from weft.recipe import Source

_EOS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>", "<eos>", "[EOS]")

#: Training text of ``train:N``: at most this many characters, in pieces spread over the whole corpus.
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

    def encode_many(self, texts: list[str]) -> list[np.ndarray]:
        """:meth:`encode` for several texts, on all cores."""
        if self._model is None:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]
        encoded = self._model.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in encoded]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of ``ids``; special tokens are left out, bytes that are not UTF-8 become U+FFFD."""
        if self._model is None:
            return bytes(int(i) for i in ids if i < 256).decode(errors="replace")
        return self._model.decode([int(i) for i in ids], skip_special_tokens=True)

    def files(self) -> dict[str, bytes]:
        """``tokenizer.json`` (and the name of ``eos``), which :func:`load_tokenizer` and transformers read."""
        if self._model is None:
            return {"tokenizer.json": b'{"kind": "bytes"}\n'}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self._model.id_to_token(self.eos)}
        text = json.dumps(config, indent=2) + "\n"
        return {"tokenizer.json": self._model.to_str().encode(), "tokenizer_config.json": text.encode()}

    def save(self, folder: str | Path) -> None:
        """Write :meth:`files` into ``folder``."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            (Path(folder) / name).write_bytes(content)


def load_tokenizer(spec: str, sources: Sequence[Source] = (), cache: Path | None = None) -> Tokenizer:
    """The tokenizer that ``spec`` names: ``bytes``, ``train:N``, or a ``tokenizer.json`` or folder that holds one.

    ``sources`` are what ``train:N`` trains on, once per corpus; the result is kept in ``cache``.
    """
    if spec == "bytes":
        return Tokenizer(257, 256, "bytes")
    if spec.startswith("train:"):
        spec = str(_trained(spec, [source for source in sources if source.kind != "tokens"], cache_root(cache)))
    path = Path(spec).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise WeftError(f"tokenizer {spec!r}: no file {path}; use 'bytes', 'train:N' or a tokenizer.json")
    config = path.with_name("tokenizer_config.json")
    try:
        text = path.read_text(encoding="utf-8")
        if json.loads(text) == {"kind": "bytes"}:
            return load_tokenizer("bytes")
        model = tokenizers.Tokenizer.from_str(text)
        named = json.loads(config.read_text(encoding="utf-8")).get("eos_token") if config.is_file() else None
        named = named["content"] if isinstance(named, dict) else named
    except Exception as error:  # the library raises nothing narrower
        raise WeftError(f"{path} or its {config.name} is damaged: {str(error).splitlines()[0]}") from None
    model.no_padding()
    model.no_truncation()
    model.encode_special_tokens = True  # "<|endoftext|>" within a document must not end it
    ids = model.get_vocab(with_added_tokens=True)
    eos = next((ids[name] for name in (named, *_EOS) if name in ids), None)
    if eos is None:
        raise WeftError(f"{path} has no end-of-document token; name one as 'eos_token' in {config.name} beside it")
    return Tokenizer(max(ids.values()) + 1, eos, digest(model.to_str(), eos), model)


def _trained(spec: str, sources: Sequence[Source], root: Path) -> Path:
    """Folder of the byte-level BPE (Sennrich et al. 2016, Radford et al. 2019) trained on ``sources``."""
    size = spec.removeprefix("train:")
    if not size.isdecimal() or int(size) < 257:
        raise UsageError(f"tokenizer {spec!r}: N must be a number of at least 257 (256 bytes and {_EOS[0]})")
    if not sources:
        raise UsageError(f"tokenizer {spec!r} needs a source of text; name the tokenizer that made the 'tokens'")

    def train(folder: Path) -> None:
        model = tokenizers.ByteLevelBPETokenizer()
        model.train_from_iterator(sample(sources), int(size), 1, show_progress=False, special_tokens=[_EOS[0]])
        model.save(str(folder / "tokenizer.json"))

    key = digest(size, _SAMPLE, _PIECE, [fingerprint(source) for source in sources])
    return build_once(root / f"tokenizer-{key}", train)


def sample(sources: Sequence[Source], size: int = _SAMPLE) -> list[str]:
    """At most ``size`` characters of text, as pieces evenly spaced over all documents, in one pass."""
    kept: list[str] = []
    held, stride = 0, 1
    texts = (text for source in sources for text in documents(source))
    pieces = (text[at : at + _PIECE] for text in texts for at in range(0, len(text), _PIECE))
    for number, piece in enumerate(pieces):
        if number % stride == 0:
            kept.append(piece)
            held += len(piece)
        if held > size and len(kept) > 1:  # too much: from now on, and so far, only every other piece
            kept, stride = kept[::2], 2 * stride
            held = sum(map(len, kept))
    return kept
