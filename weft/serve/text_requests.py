"""Write texts after many prompts together, among them the texts that a recipe asks for at the end of a run."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from weft.checkpoint.address import Where
from weft.checkpoint.model import open_model, tokenizer_of
from weft.data.chat.encode import prompt_ids
from weft.data.detokenizer import TextDecoder
from weft.data.tokenizer import Tokenizer
from weft.generate.engine import Engine
from weft.generate.sampling import Sampling
from weft.recipe import Generate


class TextRequest(NamedTuple):
    """A text to generate after the token ids ``ids``.

    Attributes:
        ``ids``: token ids of the prompt.
        ``most``: largest number of tokens of the text.
        ``how``: settings of sampling.
        ``stops``: token ids that end the text.
        ``until``: strings that end the text.
    """

    ids: Sequence[int]
    most: int
    how: Sampling
    stops: Collection[int]
    until: Sequence[str] = ()


def write_texts(
    engine: Engine,
    tokenizer: Tokenizer,
    asks: Sequence[TextRequest],
    done: Callable[[], object] = lambda: None,
) -> list[str]:
    """Generate the texts that ``asks`` describe, all at the same time, and return a list of them in the same order.

    ``done``: called each time a text ends. It is not called for a text of which no token is asked for.
    """
    writers = {
        engine.submit(a.ids, a.most, a.how, a.stops)[0]: TextDecoder(tokenizer, a.until)
        for a in asks
    }
    texts, left = (
        dict.fromkeys(writers, ""),
        {generation for generation in writers if not generation.finished},
    )
    while left:
        for generation, token, _, finished in engine.step():
            if generation not in left:
                continue  # written after its stop string had come
            if token is not None:
                texts[generation] += writers[generation].add(token)
            if finished or writers[generation].stopped:
                texts[generation] += writers[generation].end()
                engine.cancel(generation)
                left.discard(generation)
                done()
    return list(texts.values())


def samples(
    where: Where, settings: Generate, warn: Callable[[str], None], ema: bool = False
) -> list[str]:
    """Generate a text for each prompt of ``settings``, and return the list of these texts. With ``settings.chat`` each
    prompt is a message of the user's, and the text is the model's answer.

    ``where``: the checkpoint of the model. ``warn``: called with warnings. ``ema``: whether to use the moving averages
    of its parameters in place of the parameters.
    """
    model, files, _ = open_model(where, "cpu", warn, ema)
    tokenizer, how = (
        tokenizer_of(files, where, warn),
        Sampling(settings.temperature, settings.top_k),
    )
    asks = [
        TextRequest(
            prompt_ids(tokenizer, prompt, settings.chat, str(where)),
            settings.tokens,
            how,
            tokenizer.stops,
        )
        for prompt in settings.all_prompts
    ]
    return write_texts(Engine(model), tokenizer, asks)
