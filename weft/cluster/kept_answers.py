"""Answers that an engine goes on with while its router is gone, for clients that ask for them again."""

import hashlib
import json
import time
from dataclasses import dataclass

from weft.cluster.cluster_messages import LogProbability, TokenMessage, submit_message
from weft.generate.backend import AnswerRequest
from weft.generate.engine_thread import EngineThread
from weft.generate.request import Generation, Written

#: Seconds for which an answer is kept.
KEEP_S = 60.0


def kept_key(key: str, request: AnswerRequest) -> str:
    """Return the key under which an engine keeps the answer to ``request``: a hash of ``key``, which the client has
    chosen, and of everything on which the answer depends. As the request is part of the hash, nobody gets this answer
    with the key of another request.
    """
    head, (ids,) = submit_message(0, request, ())
    asked = {name: head[name] for name in head if name not in ("workflow", "keys")}  # fmt: skip
    hashed = hashlib.blake2b(ids, digest_size=16)
    hashed.update(json.dumps([key, asked], sort_keys=True).encode())
    return hashed.hexdigest()


@dataclass
class _Kept:
    """An answer that is kept. ``since``: when that began, on the monotonic clock; ``end``: the result of the step that
    has ended it, or None.
    """

    generation: Generation
    since: float
    end: Written | None = None


class KeptAnswers:
    """Lets the engine of ``thread`` continue answers of a router that is gone, each for :data:`KEEP_S` seconds. All
    methods are called in the engine's thread.
    """

    def __init__(self, thread: EngineThread) -> None:
        self.thread = thread
        self._kept: dict[str, _Kept] = {}

    @property
    def keys(self) -> list[str]:
        """Keys of the kept answers, the oldest first."""
        return [*self._kept]

    def keep(self, key: str, generation: Generation) -> None:
        """Continue ``generation`` and keep it under ``key``, so that :meth:`take` finds it. Nothing is kept if the
        answer has left this engine.
        """
        self._drop(key)
        if generation not in self.thread.tells:
            return
        kept = self._kept[key] = _Kept(generation, time.monotonic())

        def note(written: Written | None) -> None:
            if written is None:
                self._kept.pop(key, None)
            elif written.finished:
                kept.end = written

        self.thread.tells[generation] = note

    def take(
        self, key: str, answer: int, request: AnswerRequest
    ) -> tuple[Generation, list[TokenMessage]] | None:
        """Remove the answer to ``request`` that is kept under ``key``, and return it with messages of all tokens that
        ``request`` does not have yet. ``answer``: number by which the messages name the answer.

        Return None if no such answer is kept, if the answer has failed or moved to another engine, or if its tokens or
        log-probabilities do not fit ``request``.
        """
        kept = self._kept.pop(key, None)
        if kept is None:
            return None
        generation, end, begun = kept.generation, kept.end, len(request.written)
        if end is None and generation not in self.thread.tells:
            return None  # it has moved to another engine meanwhile
        tokens = generation.written
        scores: list[LogProbability | None] = [*generation.log_probabilities]
        known = tokens[:begun] == [*request.written]
        if request.top is None:
            scores = [None] * len(tokens)
        if request.scored:
            known &= len(generation.prompt_scores) == generation.prompt - 1
        failed = end is not None and end.finished == "error"
        if failed or not known or len(scores) != len(tokens):
            self.thread.end([generation])
            return None
        messages = [
            TokenMessage(answer, place, tokens[place], scores[place], "")
            for place in range(begun, len(tokens))
        ]
        if end is not None and end.token is not None and messages:
            messages[-1] = messages[-1]._replace(finished=end.finished)
        elif end is not None:
            messages.append(TokenMessage(answer, len(tokens), None, None, end.finished))
        return generation, messages

    def make_room(self, answers: int) -> None:
        """Drop all answers that were kept for too long. If ``answers`` new answers then cannot begin, drop unfinished
        kept answers, the oldest first, until they can.
        """
        now = time.monotonic()
        for key, kept in [*self._kept.items()]:
            full = len(self.thread.tells) + answers > self.thread.most
            if now - kept.since > KEEP_S or (full and kept.end is None):
                self._drop(key)

    def drop_all(self) -> None:
        """Drop all kept answers, because other engines continue them."""
        for key in self.keys:
            self._drop(key)

    def _drop(self, key: str) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None and kept.generation in self.thread.tells:
            self.thread.end([kept.generation])
