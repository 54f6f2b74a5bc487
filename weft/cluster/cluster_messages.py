"""What a router and its engines say to each other: frames of a head in JSON and, for prompts and vectors, raw numbers.

The router sends ``submit``, ``search``, ``embed``, ``score``, ``cancel``, ``move``, ``lenders``, ``lend``,
``memories``, ``beat``, ``leave`` and ``end``; an engine sends ``about`` when it connects, then ``kept``, ``taken``,
``refused``, ``tokens``, ``result``, ``moved``, ``weights``, ``beat``, ``drain``, ``halted`` and ``failed``.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from weft.errors import UsageError, WeftError
from weft.generate.backend import (
    AnswerRequest,
    Busy,
    EngineLoad,
    Hypothesis,
    SearchRequest,
)
from weft.generate.grammar import GrammarSource
from weft.generate.sampling import Sampling
from weft.generate.workflow import Workflow
from weft.net.wire import Frame, Head

#: The name of the channel between a router and its engines.
CHANNEL = "cluster"

#: Seconds between two signs of life, and without any sign until an engine is given up. An engine must be given up
#: within two seconds of its last step.
BEAT_S, SILENT_S = 0.25, 1.5

#: Signs of life of the router that an engine has not got when it sends its own: with as many it hears nothing, and is
#: given up as well, within two seconds.
UNHEARD = round(SILENT_S / BEAT_S)

#: Seconds without any sign of life after which an engine gives its router up: longer, as the router has more to do. The
#: router does not wait for this: it knows from the engine's signs of life what the engine has heard.
ROUTER_SILENT_S = 6.0

Message = tuple[Head, list[memoryview]]
LogProbability = tuple[float, dict[int, float]]


class EngineAbout(NamedTuple):
    """What an engine says of itself when it joins.

    Attributes:
        ``name``: how router and metrics call the engine.
        ``instance``: random text that no other process has.
        ``version``: version of Weft.
        ``fingerprint``: hash of the model's configuration and weights.
        ``vocab``: number of token ids of the model.
        ``embed``: number of elements of an embedding.
        ``cache``: number of tokens for which the cache has room.
        ``block``: number of tokens of a cache block.
        ``most``: largest number of answers that the engine writes at a time.
        ``searches``: whether beam searches are possible.
        ``adapters``: hash of each adapter, by name.
        ``loans``: host and port at which other engines move cache blocks into this engine's cache; empty if it holds
            none for others.
        ``memory``: host and port at which other engines read the blocks that this engine keeps in host memory, and
            store blocks if its role is "cache"; empty if it keeps none.
        ``role``: "prefill" or "decode", empty if it does both, or "cache" if it only keeps blocks for the others.
        ``host``, ``port``: where other engines reach it.
        ``hung``: longest time in seconds, since it last joined, in which the engine computed and its threads could not
            run (:class:`weft.cluster.pulse.Pulse`).
        ``weights``: version of its weights, where a training run changes them; else 0.
        ``rows``: largest number of answers of a step; further ones wait, or are refused if they come from another
            engine. 0: not known.
    """

    name: str
    instance: str
    version: str
    fingerprint: str
    vocab: int
    embed: int
    cache: int
    block: int
    most: int
    searches: bool
    adapters: dict[str, str]
    loans: Sequence[Any] = ()
    memory: Sequence[Any] = ()
    role: str = ""
    host: str = ""
    port: int = 0
    hung: float = 0.0
    weights: int = 0
    rows: int = 0


#: The parts that an engine may have in answering: computing prompts, writing, and keeping blocks for the others.
ROLES = ("prefill", "decode", "cache")


class EngineBeat(NamedTuple):
    """A sign of life of an engine. The last three fields keep their defaults unless the engine lends cache blocks.

    Attributes:
        ``load``: queues and cache of the engine.
        ``demand``: cache blocks that the waiting answers will need.
        ``taken``: number of submissions that the engine has received. By it the router knows which answers are counted
            in ``load``.
        ``heard``: number of the router's last sign of life that has come.
        ``rates``: seconds of a step for one of each of the numbers of :func:`weft.generate.step_work.work_of`; none
            until there are measurements.
        ``keys``: number of cached tokens that belong to the answers that the engine writes.
        ``longest``: largest number of cache blocks of one answer that could be moved to a lender.
        ``seconds``: measured parts of the duration of a step, the four fields of :class:`StepSeconds` in their order;
            empty until there are measurements.
    """

    load: EngineLoad
    demand: int
    taken: int
    heard: int = 0
    rates: Sequence[float] = ()
    keys: int = 0
    longest: int = 0
    seconds: Sequence[float] = ()


class TokenMessage(NamedTuple):
    """A token of an answer, as an engine sends it to its router.

    Attributes:
        ``answer``: number of the answer.
        ``place``: index of the token among the answer's tokens.
        ``token``: the token's id; None if the answer ended without a further token.
        ``log_probability``: pair of the log-probability of ``token``, and the log-probabilities of the likeliest tokens
            by their ids; None if they were not asked for.
        ``finished``: why the answer ended; "" if it goes on.
    """

    answer: int
    place: int
    token: int | None
    log_probability: LogProbability | None
    finished: str


def submit_message(
    answer: int,
    request: AnswerRequest,
    written: Sequence[int],
    keys: Sequence[str] = (),
    moves: Sequence[Head] = (),
) -> Message:
    """Return the message that submits ``request`` to an engine. ``answer``: number of the request's first answer; its
    other answers have the numbers after it. ``written``: tokens of the answer that the client has already received; the
    engine continues behind them. ``keys``: for each answer, the key by which the engine keeps it when the router is
    gone, or "" for an answer that it does not keep; empty: it keeps none. ``moves``: messages that let answers go on at
    another engine after their first token. They come with the request, so that the engine takes no step before it
    knows them.
    """
    grammar, workflow = request.grammar, request.workflow
    head = {
        "kind": "submit",
        "answer": answer,
        "keys": [*keys],
        "moves": [*moves],
        "prompt": len(request.ids),
        "most": request.most,
        "how": sampling_values(request.how),
        "stops": list(request.stops),
        "answers": request.answers,
        "top": request.top,
        "tenant": request.tenant,
        "grammar": None if grammar is None else list(grammar.source),
        "adapter": request.adapter,
        "least": request.least,
        "scored": request.scored,
        "priority": request.priority,
        "workflow": None if workflow is None else workflow.frame(time.monotonic()),
    }
    return head, [packed_ids([*request.ids, *written])]


def read_submit(frame: Frame) -> AnswerRequest:
    """Return the request that a ``submit`` message, ``frame``, describes. It lacks the grammar, because compiling one
    takes time (:func:`grammar_source`).
    """
    head, ids = frame.head, unpacked_ids(frame.payload)
    workflow = head["workflow"]
    return AnswerRequest(
        ids[: head["prompt"]],
        head["most"],
        read_sampling(head["how"]),
        head["stops"],
        head["answers"],
        head["top"],
        head["tenant"],
        None,
        head["adapter"],
        head["least"],
        head["scored"],
        ids[head["prompt"] :],
        None if workflow is None else Workflow.of_frame(workflow, time.monotonic()),
        head["priority"],
    )


def grammar_source(head: Head) -> GrammarSource | None:
    """Return the text from which the grammar of a ``submit`` message is to be compiled; None if it has no grammar.
    ``head``: the JSON object of the message.
    """
    return None if head["grammar"] is None else GrammarSource(*head["grammar"])


def sampling_values(how: Sampling) -> dict[str, Any]:
    """Return settings of sampling as JSON values; biases become pairs of an id and a number."""
    return asdict(how) | {"bias": [*how.bias.items()]}


def read_sampling(values: dict[str, Any]) -> Sampling:
    """Return the settings of sampling from their JSON values."""
    return Sampling(**values | {"bias": {int(i): bias for i, bias in values["bias"]}})


def search_message(call: int, request: SearchRequest) -> Message:
    """Return the message that asks an engine for the beam search ``request``. ``call``: number by which the engine's
    reply names the search.
    """
    about = request._asdict()
    ids = about.pop("ids")
    return {"kind": "search", "call": call, **about, "stops": list(request.stops)}, [
        packed_ids(ids)
    ]


def read_search(frame: Frame) -> SearchRequest:
    """Return the request of a beam search that the ``search`` message ``frame`` describes."""
    values = {name: frame.head[name] for name in SearchRequest._fields if name != "ids"}
    return SearchRequest(ids=unpacked_ids(frame.payload), **values)


def read_hypotheses(values: Sequence[Sequence[Any]]) -> list[Hypothesis]:
    """Return the finished texts of a beam search from their JSON values: one list of fields per text."""
    return [Hypothesis(*each) for each in values]


def token_values(message: TokenMessage) -> list[Any]:
    """Return the five fields of ``message`` as a JSON list. The log-probability in this list has the form of
    :func:`score_values`.
    """
    said = message.log_probability
    return [
        message.answer,
        message.place,
        message.token,
        None if said is None else score_values(said),
        message.finished,
    ]


def read_token(values: Sequence[Any]) -> TokenMessage:
    """Return the token in ``values``, a list that :func:`token_values` has returned."""
    answer, index, token, said, finished = values
    return TokenMessage(
        answer, index, token, None if said is None else read_score(said), finished
    )


def score_values(said: LogProbability) -> list[Any]:
    """Return the JSON form of a token's log-probability: a list of this number, and of a list with a pair ``[id,
    log-probability]`` for each of the likeliest tokens.
    """
    return [said[0], [*said[1].items()]]


def read_score(values: Sequence[Any]) -> LogProbability:
    """Return a token's log-probability, and those of the likeliest tokens by id. ``values``: the list that
    :func:`score_values` has returned.
    """
    chosen, likeliest = values
    return chosen, {int(i): value for i, value in likeliest}


def read_beat(head: Head) -> EngineBeat:
    """Return the sign of life in ``head``, the JSON object of a ``beat`` message."""
    values = {name: head[name] for name in EngineBeat._fields if name in head}
    return EngineBeat(**values | {"load": EngineLoad(*head["load"])})


def refusal_values(error: BaseException) -> dict[str, str]:
    """Return the fields of a message that tells another process why an engine does not answer: the text and the kind of
    ``error``. :func:`read_refusal` builds an error of the same kind from them.
    """
    kind = "failed"
    if isinstance(error, Busy):
        kind = "busy"
    elif isinstance(error, UsageError):
        kind = "usage"
    said = str(error) if isinstance(error, WeftError) else repr(error)
    return {"why": said, "error": kind}


def read_refusal(head: Head) -> WeftError:
    """Return the error that a message of :func:`refusal_values` describes: :class:`Busy`, :class:`UsageError`, or else
    :class:`WeftError`.
    """
    kinds: dict[str, type[WeftError]] = {"busy": Busy, "usage": UsageError}
    return kinds.get(head["error"], WeftError)(head["why"])


def packed_ids(ids: Sequence[int]) -> memoryview:
    """Return the token ids ``ids`` as bytes, little-endian with 32 bits each."""
    return memoryview(np.asarray(ids, "<i4").tobytes())


def unpacked_ids(payload: memoryview) -> list[int]:
    """Return the token ids in ``payload``, bytes that :func:`packed_ids` has returned."""
    ids: list[int] = np.frombuffer(payload, "<i4").tolist()
    return ids
