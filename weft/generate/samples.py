"""What a model answers to a recipe's prompts, and a run's first and last answers side by side."""

from collections.abc import Callable

from weft.checkpoint.model import open_model, tokenizer_of
from weft.checkpoint.s3 import Where
from weft.data.chat.encode import prompt_ids
from weft.generate.engine import Engine
from weft.generate.sampling import Sampling
from weft.generate.text import Ask, write_texts
from weft.recipe import Generate


def samples(where: Where, settings: Generate, warn: Callable[[str], None], ema: bool = False) -> list[str]:
    """What the model at ``where`` writes after each prompt, or answers to it with ``settings.chat``.

    ``ema``: the model with the averages of its parameters.
    """
    model, files = open_model(where, "cpu", warn, ema)
    tokenizer = tokenizer_of(files, where)
    how = Sampling(settings.temperature, settings.top_k)
    asks = [
        Ask(prompt_ids(tokenizer, prompt, settings.chat, str(where)), settings.tokens, how, tokenizer.stops)
        for prompt in settings.all_prompts
    ]
    return write_texts(Engine(model), tokenizer, asks)
