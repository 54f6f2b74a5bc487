"""A conversation in a terminal or a pipe, with a model on this machine or with an OpenAI-compatible server."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from weft.encodable import encodable
from weft.errors import WeftError
from weft.serve.api_client import ApiClient, error_reason

if TYPE_CHECKING:
    from weft.generate.sampling import Sampling

Messages = list[dict[str, str]]
#: Writes the assistant's answer to a conversation, piece by piece.
Speaker = Callable[[Messages], Iterator[str]]

HELP = "/reset forgets the conversation, /system TEXT sets the system message, /quit or Ctrl-D leaves, Ctrl-C stops"


def talk(speaker: Speaker, system: str = "") -> None:
    """Hold a conversation in the terminal: read the user's messages line by line, and print the answers as they are
    written. It ends with the input or with ``/quit``.

    ``speaker``: writes the answer to a conversation, piece by piece. ``system``: the system message; "": none.

    In a terminal Ctrl-C stops an answer, whose beginning stays in the conversation, and an invalid line is reported and
    skipped. If the input is a pipe, Ctrl-C or an invalid line ends the command.
    """
    terminal = sys.stdin.isatty()
    said: Messages = []
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # arrow keys in what is typed
        print(f"weft: {HELP}", file=sys.stderr)
    while (line := _read_line(terminal)) is not None:
        word, _, rest = line.strip().partition(" ")
        if not word:
            continue
        if word == "/quit":
            return
        if word in ("/reset", "/system"):
            said, system = [], rest.strip() if word == "/system" else system
            print(
                "weft: a new conversation"
                + f", with the system message {system!r}" * bool(system),
                file=sys.stderr,
            )
        elif word.startswith("/") and not word.startswith("//"):
            print(
                f"weft: {word} is no command; {HELP}; '//' begins a line with '/'",
                file=sys.stderr,
            )
        else:
            said.append(
                {
                    "role": "user",
                    "content": line.strip().removeprefix("/" * word.startswith("//")),
                }
            )
            opening = [{"role": "system", "content": system}] if system else []
            try:
                answer = _print_answer(speaker([*opening, *said]), terminal)
            except WeftError as error:
                if not terminal:
                    raise
                print(f"weft: {error}", file=sys.stderr)
                said.pop()
                continue
            said.append({"role": "assistant", "content": answer})


def _read_line(terminal: bool) -> str | None:
    """Return the next line of the input; None at its end. In a terminal Ctrl-C drops what has been typed."""
    if not terminal:  # a server takes none of the bytes that are no UTF-8
        return encodable(sys.stdin.readline()) or None
    while True:
        try:
            with _ctrl_c(signal.default_int_handler):
                return input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print("\nweft: Ctrl-D leaves", file=sys.stderr)


def _print_answer(pieces: Iterator[str], terminal: bool) -> str:
    """Print an answer as it comes; return it, or its beginning if Ctrl-C has stopped it."""
    written, stopped = "", list[int]()
    handler = (lambda number, frame: stopped.append(number)) if terminal else None
    with _ctrl_c(handler):
        for piece in pieces:
            print(piece, end="", flush=True)
            written += piece
            if stopped:  # between two pieces, where nothing is half done
                break
    close = getattr(pieces, "close", None)
    if close is not None:
        close()
    print(flush=True)
    if stopped:
        print("weft: stopped", file=sys.stderr)
    return written


@contextmanager
def _ctrl_c(handler: Callable[[int, FrameType | None], Any] | None) -> Iterator[None]:
    """Call ``handler`` on Ctrl-C in the context; None leaves Ctrl-C as it is."""
    if handler is None:
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def server_speaker(url: str, key: str, settings: dict[str, Any]) -> Speaker:
    """Return a speaker that asks the first model of the server at ``url``. ``key``: API key; ``settings``: fields that
    go into every request.

    Raises :class:`WeftError` if the server cannot be reached, or refuses the request.
    """
    client = ApiClient(url, key)
    name = client.first_model()

    def speak(messages: Messages) -> Iterator[str]:
        body = {"model": name, "messages": messages, "stream": True, **settings}
        with client.open("/chat/completions", body) as reply:
            for line in reply:
                event = line.decode(errors="replace").strip()
                if not event.startswith("data:") or event.endswith("[DONE]"):
                    continue
                message = json.loads(event.removeprefix("data:"))
                if "error" in message:
                    raise WeftError(
                        f"{url}: {error_reason(event.removeprefix('data:').encode())}"
                    )
                for choice in message.get("choices", ()):
                    if piece := (choice.get("delta") or {}).get("content"):
                        yield piece

    return speak


def model_speaker(
    checkpoint: str,
    tokens: int,
    how: "Sampling",
    weights: str,
    ema: bool,
    warn: Callable[[str], None],
    cache_policy: str = "none",
) -> Speaker:
    """Return a speaker that runs the model of ``checkpoint`` in this process. Its cache keeps the earlier turns of a
    conversation.

    Args:
        ``tokens``: largest number of tokens of an answer.
        ``how``: settings of sampling.
        ``weights``: number format of the weights.
        ``ema``: whether to use the moving averages of the parameters in place of the parameters.
        ``warn``: called with warnings.
        ``cache_policy``: value of ``--cache-policy``.
    """
    import torch

    from weft.checkpoint.model import open_model, tokenizer_of
    from weft.data.chat.encode import own_encoder, prompt_ids
    from weft.data.detokenizer import stream_text
    from weft.generate.cache_policy import cache_policy_of
    from weft.generate.engine import Engine
    from weft.models.products import read_only

    policy = cache_policy_of(cache_policy)
    model, files, _ = open_model(
        checkpoint, "cuda" if torch.cuda.is_available() else "cpu", warn, ema
    )
    read_only(model, weights)
    tokenizer = tokenizer_of(files, checkpoint)
    # a model without a template is refused before anybody types
    own_encoder(tokenizer, checkpoint)
    engine = Engine(model, graphs=True, cache_policy=policy)

    def speak(messages: Messages) -> Iterator[str]:
        ids = prompt_ids(tokenizer, messages, True, checkpoint)
        yield from stream_text(
            tokenizer,
            engine.stream(engine.submit(ids, tokens, how, tokenizer.stops)[0]),
        )

    return speak


def key_of_environment() -> str:
    """Return the API key in the environment variable ``OPENAI_API_KEY``, or "" if it is not set."""
    return os.environ.get("OPENAI_API_KEY", "")
