"""Write texts after many prompts together, among them the texts that a recipe asks for at the end of a run."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from weft.checkpoint.address import Where
from weft.checkpoint.model import open_model, tokenizer_of
from weft.data.chat.encode import prompt_ids
from weft.data.detokenizer import TextDecoder
from weft.data.tokenizer import Tokenizer
from weft.errors import WeftError
from weft.generate.engine import Engine
from weft.generate.request import Generation
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


class FinishedText(NamedTuple):
    """A text that has ended.

    Attributes:
        ``number``: index of its request among the requests that were given.
        ``text``: the text.
        ``finished``: why it ended: "stop", "length" or "error".
        ``failure``: error line of a text that could not go on; "" if it could.
    """

    number: int
    text: str
    finished: str
    failure: str = ""


def finished_texts(
    engine: Engine, tokenizer: Tokenizer, asks: Iterable[TextRequest], most: int = 0
) -> Iterator[FinishedText]:
    """Generate the texts that ``asks`` describe with ``engine``, many at the same time, and yield each as soon as it
    has ended.

    ``most``: largest number of texts that are begun and have not ended; 0: all are begun at once. No request is taken
    from ``asks`` before it can begin.
    """
    coming = enumerate(asks)
    left = dict[Generation, _TextUnderWay]()
    more = True
    try:
        while more or left:
            while more and not (most and len(left) >= most):
                number, ask = next(coming, (-1, None))
                if ask is None:
                    more = False
                    break
                generation = engine.submit(ask.ids, ask.most, ask.how, ask.stops)[0]
                if generation.finished:  # no token is asked for
                    yield FinishedText(number, "", generation.finished)
                    continue
                decoder = TextDecoder(tokenizer, ask.until)
                left[generation] = _TextUnderWay(number, decoder, [])
            for generation, token, _, finished in engine.step() if left else ():
                if generation not in left:
                    continue  # written after its stop string had come
                number, decoder, pieces = left[generation]
                if token is not None:
                    pieces.append(decoder.add(token))
                if finished or decoder.stopped:
                    pieces.append(decoder.end())
                    engine.cancel(generation)
                    del left[generation]
                    why = "stop" if decoder.stopped else finished
                    text = "".join(pieces)
                    yield FinishedText(number, text, why, generation.failure)
    finally:
        for generation in left:
            engine.cancel(generation)


class _TextUnderWay(NamedTuple):
    """A text that an engine writes: index of its request, decoder of its tokens, pieces of text so far."""

    number: int
    decoder: TextDecoder
    pieces: list[str]


def write_texts(
    engine: Engine,
    tokenizer: Tokenizer,
    asks: Sequence[TextRequest],
    done: Callable[[], object] = lambda: None,
) -> list[str]:
    """Generate the texts that ``asks`` describe with ``engine``, all at the same time, and return a list of them in the
    same order.

    ``done``: called each time a text ends. Raises :class:`WeftError` for a text that cannot go on.
    """
    texts = [""] * len(asks)
    for number, text, _, failure in finished_texts(engine, tokenizer, asks):
        if failure:
            raise WeftError(failure)
        texts[number] = text
        done()
    return texts


def samples(
    where: Where, settings: Generate, warn: Callable[[str], None], ema: bool = False
) -> list[str]:
    """Generate a text for each prompt of ``settings``, and return the list of these texts. With ``settings.chat`` each
    prompt is a user's message, and the text is the model's answer. ``where``: the checkpoint of the model. ``warn``:
    called with warnings. ``ema``: whether to use the moving averages of the parameters in place of the parameters.
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
    return write_texts(Engine(model, graphs=True), tokenizer, asks)
