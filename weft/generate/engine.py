"""Token by token generation with key/value caches, on one device or, of long prompts, over several ranks."""

from collections.abc import Collection, Iterable, Iterator

import torch

from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError
from weft.generate.cache import attending, layer_caches
from weft.generate.spread import SpreadReader
from weft.layout.layout import Layout
from weft.models.transformer import Transformer


@torch.inference_mode()
def generate(
    model: Transformer,
    prompt_ids: list[int],
    max_new: int,
    stops: Collection[int],
    temperature: float,
    top_k: int,
    seed: int = 0,
    layout: Layout | None = None,
) -> Iterator[int]:
    """Yield up to ``max_new`` ids that continue ``prompt_ids``, as they come; ends at one of ``stops``, not yielded.

    ``temperature`` 0 takes the likeliest id; ``top_k`` 0 samples from all; the same ``seed`` gives the same ids. With
    ``cp`` > 1 in ``layout`` all its ranks call this with the same arguments, each with the whole model, and get the
    same ids (:mod:`weft.generate.spread`). Errors: prompts out of range, and those of :func:`check_spread`.
    """
    if model.shape.output == "score":
        raise UsageError("this is a reward model, which scores texts and writes none; give one that writes")
    if not prompt_ids or min(prompt_ids) < 0 or max(prompt_ids) >= model.shape.vocab:
        raise UsageError(f"the prompt must be at least one token, of ids below the model's {model.shape.vocab}")
    generator = torch.Generator(model.mesh.device).manual_seed(seed)
    reader = SpreadReader(model, layout) if layout and layout.world > 1 else LocalReader(model)
    ids = prompt_ids
    for _ in range(max_new):
        logits = reader.read(ids)
        chosen = reader.agree(None if logits is None else choose(logits, temperature, top_k, generator))
        if chosen in stops:
            return
        yield chosen
        ids = [chosen]


class LocalReader:
    """Reads tokens of one sequence on one device."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.past = model, 0
        self.caches = layer_caches(model)
        self.whole: list[int] = []  # of a plugin's model, which cannot remember: all that has been read

    def read(self, ids: list[int]) -> torch.Tensor:
        """The prompt, later new tokens: logits ``[vocab]`` of the last one."""
        device = self.model.mesh.device
        if self.model.shape.kind:
            self.past, self.whole = 0, self.whole + ids
            ids = self.whole
        tokens = torch.tensor([ids], device=device)
        positions = torch.arange(self.past, self.past + len(ids), device=device)[None]
        documents = torch.tensor([0, len(ids)], dtype=torch.int32)
        self.past += len(ids)
        with attending(self.model, self.caches):
            return self.model(tokens, positions, documents, last=1)[0, 0]

    def agree(self, chosen: int | None) -> int:
        """What has been chosen, as there is nobody else."""
        assert chosen is not None
        return chosen


def choose(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One id drawn from ``logits`` ``[vocab]``."""
    if temperature == 0:
        return int(logits.argmax())
    best, index = logits.float().topk(min(top_k or len(logits), len(logits)))
    # Largest logit 0 first: dividing by a tiny temperature then gives -inf at worst, never inf - inf.
    weights = ((best - best[0]) / temperature).softmax(-1)
    return int(index[torch.multinomial(weights, 1, generator=generator)])


def stream_text(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Text of ``ids`` piece by piece, whole characters only; the pieces add up to the text of all ids."""
    shown: list[int] = []
    fresh: list[int] = []
    for i in ids:
        fresh.append(i)
        # What new ids add to the text of the ones just before: tokenizers may drop the space of a first token.
        before, text = tokenizer.decode(shown), tokenizer.decode(shown + fresh)
        # U+FFFD at the end: some bytes of the last character are still to come.
        if len(text) > len(before) and not text.endswith("\ufffd"):
            yield text[len(before) :]
            shown, fresh = fresh, []
    if rest := tokenizer.decode(shown + fresh)[len(tokenizer.decode(shown)) :]:
        yield rest
