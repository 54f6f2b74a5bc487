"""What a model answers to a recipe's prompts, and a run's first and last answers side by side."""

from collections.abc import Callable

from weft.checkpoint.s3 import Where
from weft.generate.chat import chat_ids
from weft.generate.engine import generate, stream_text
from weft.generate.model import open_model, tokenizer_of
from weft.recipe import Generate


def samples(where: Where, settings: Generate, warn: Callable[[str], None]) -> list[str]:
    """What the model at ``where`` writes after each prompt, or answers to it with ``settings.chat``."""
    model, files = open_model(where, "cpu", warn)
    tokenizer = tokenizer_of(files, where)
    found = []
    for prompt in settings.all_prompts:
        asked = [{"role": "user", "content": prompt}]
        ids = chat_ids(tokenizer, asked, None, str(where)) if settings.chat else tokenizer.prompt_ids(prompt)
        fresh = generate(model, ids, settings.tokens, tokenizer.stops, settings.temperature, settings.top_k)
        found.append("".join(stream_text(tokenizer, fresh)))
    return found
