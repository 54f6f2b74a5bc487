"""A generator of texts behind an address: any server with OpenAI's chat completions, such as `weft serve`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cached_property
from itertools import islice
from threading import Event
from typing import Any

from weft.cache import digest
from weft.curation.passages import word_count
from weft.curation.text_generator import PromptToWrite, WritingSettings, WrittenText
from weft.errors import WeftError
from weft.serve.api_client import ApiClient, ApiRefused, ApiUnreached

#: Statuses by which a server says that it can be asked again.
AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
#: Statuses by which a server refuses one prompt, and not whoever asks.
REFUSED = frozenset({400, 413, 422})
#: Seconds before a request is sent again, doubled each time.
FIRST_WAIT_S = 0.25
#: Most seconds between two attempts.
LONGEST_WAIT_S = 30.0


class ServedGenerator:
    """Writes texts with a server of OpenAI's chat completions, many at a time.

    ``client``: client of the server. ``model``: name of its model; "": the first that the server lists. ``requests``:
    largest number of requests at the same time. ``patience``: seconds for which a request is repeated if the server is
    busy or cannot be reached.
    """

    def __init__(
        self, client: ApiClient, model: str, requests: int, patience: float
    ) -> None:
        self.client, self.named = client, model
        self.requests, self.patience = requests, patience

    @cached_property
    def model(self) -> str:
        """Name of the model that the server is asked for: the given name, or the first model that the server lists."""
        return self.named or self.client.first_model()

    def digest(self) -> str:
        return digest("served", 1, self.model)

    def count(self, text: str) -> int:
        return word_count(text)

    def write(
        self, prompts: Iterable[PromptToWrite], settings: WritingSettings
    ) -> Iterator[WrittenText]:
        coming, ended = iter(prompts), Event()
        pool = ThreadPoolExecutor(self.requests, "rephrase")
        try:
            left = set[Future[WrittenText]]()
            while True:
                for prompt in islice(coming, self.requests - len(left)):
                    left.add(pool.submit(self._written, prompt, settings, ended))
                if not left:
                    return
                done, left = wait(left, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            ended.set()  # no request is sent again
            pool.shutdown(wait=False, cancel_futures=True)

    def _written(
        self, prompt: PromptToWrite, settings: WritingSettings, ended: Event
    ) -> WrittenText:
        """Ask for one text, again and again while the server is busy or away."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt.prompt}],
            "max_tokens": settings.tokens,
            "temperature": settings.temperature,
            "seed": prompt.seed,
        }
        if settings.top_p < 1:
            body["top_p"] = settings.top_p
        if settings.top_k:
            body["top_k"] = settings.top_k
        deadline, delay = time.monotonic() + self.patience, FIRST_WAIT_S
        while True:
            try:
                choice = self.client.call("/chat/completions", body)["choices"][0]
                text = choice["message"].get("content") or ""
                return WrittenText(prompt.number, text, choice.get("finish_reason") == "length")  # fmt: skip
            except ApiRefused as error:
                if error.code in REFUSED:
                    return WrittenText(prompt.number, "", failed=str(error))
                if error.code not in AGAIN:
                    raise
                failure: WeftError = error
                pause = max(delay, error.wait)
            except ApiUnreached as error:
                failure, pause = error, delay
            except (LookupError, TypeError, AttributeError):
                raise WeftError(
                    f"{self.client.url} answers without a text, not as OpenAI's chat completions do"
                ) from None
            pause = min(pause, LONGEST_WAIT_S)
            if time.monotonic() + pause > deadline or ended.wait(pause):
                raise failure
            delay *= 2
