"""Answers to one request, whole or streamed as the engine's tokens arrive: text, tool calls and finish reasons."""

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from weft.data.chat.reasoning import ReasoningFinder, Thoughts
from weft.data.detokenizer import TextDecoder
from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError, WeftError
from weft.generate.backend import AnswerEvents, Busy, NoEngine, ServerEnding, TokenEvent
from weft.serve.anthropic import MessageReplies, MessagesRequest
from weft.serve.call_finder import CallFinder, CallPiece
from weft.serve.call_form import CallForm
from weft.serve.protocol import Refusal, SamplingRequest
from weft.serve.replies import Answer, Replies, Usage, usage_of
from weft.serve.responses import ResponseReplies, ResponsesRequest
from weft.serve.server_metrics import AnswerTimer

T = TypeVar("T")

#: Characters that some clients take for ends of lines (httpx' ``iter_lines``), and JSON's escapes of them.
LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}

#: Code of the refusal of a request that no engine can answer at the moment.
NO_ENGINE = "no_engine"


class AnswerForm(NamedTuple):
    """The parts that an answer may have beside text.

    Attributes:
        ``calls``: how the model writes tool calls; None if the answer has none.
        ``names``: names of the tools that the model may call.
        ``most``: largest number of calls; None: any number.
        ``thoughts``: tags around the answer's reasoning; None if it has none.
    """

    calls: CallForm | None = None
    names: Collection[str] = ()
    most: int | None = None
    thoughts: Thoughts | None = None


#: An answer that is nothing but text.
PLAIN = AnswerForm()


class AnswerReader:
    """Converts the tokens of one answer to reasoning, text and tool calls. ``asked``: the request, whose stop strings
    end the answer. ``form``: says whether the answer may have reasoning and tool calls.
    """

    def __init__(
        self, asked: SamplingRequest, tokenizer: Tokenizer, form: AnswerForm
    ) -> None:
        self.asked, self.writer = asked, TextDecoder(tokenizer)
        self.calls = (
            CallFinder(form.calls, asked.stream, form.names, form.most)
            if form.calls
            else None
        )
        self.reasoning = ReasoningFinder(form.thoughts) if form.thoughts else None
        self.count = self.thinking = 0  # tokens so far, and those of reasoning

    def read(self, event: TokenEvent) -> Answer:
        """Return the part by which the token of ``event`` extends the answer. The part's ``finish`` is set once the
        answer has ended, for example at a stop string, even if the engine still generates tokens.
        """
        if self.asked.most == 0:  # its token is drawn only to have the prompt read
            return Answer("", [], [], "length")
        writer, thought, calls = self.writer, "", list[CallPiece]()
        self.count += event.token is not None
        if self.count > self.asked.min_tokens:  # nothing before ends the answer
            writer.stops = self.asked.stop
        text = "" if event.token is None else writer.add(event.token)
        if event.finished and not writer.stopped:
            text += writer.end()
        finish = "stop" if writer.stopped else event.finished
        if self.reasoning:
            self.thinking += self.reasoning.inside and event.token is not None
            thought, text = self.reasoning.add(text)
            if finish:
                last_thought, last_text = self.reasoning.end()
                thought, text = thought + last_thought, text + last_text
        if self.calls:
            text, calls = self.calls.add(text)
            if finish or self.calls.full:
                last_text, last_calls, finish = self.calls.end(finish)
                text, calls = text + last_text, calls + last_calls
        return Answer(text, [event], calls, finish, thought, stop=writer.stopped)


class Answering:
    """Writes the answers to the request ``asked`` as JSON.

    Args:
        ``asked``: the request.
        ``tokenizer``: converts tokens to text.
        ``model``: the model's name in the answers.
        ``prompt``: total tokens of the request's prompts, for the usage that the response reports.
        ``form``: which parts beside text an answer may have.
        ``watch``: records the times of the answers' tokens.
        ``echoes``: token ids of the prompts if answers are to begin with their prompts, else empty.
    """

    def __init__(
        self,
        asked: SamplingRequest,
        tokenizer: Tokenizer,
        model: str,
        prompt: int,
        form: AnswerForm,
        watch: AnswerTimer,
        echoes: Sequence[Sequence[int]] = (),
    ) -> None:
        self.echoes, self.n = echoes, 1
        self.asked, self.tokenizer, self.prompt, self.form, self.watch = (
            asked,
            tokenizer,
            prompt,
            form,
            watch,
        )
        self.replies = replies_to(asked, model, tokenizer, prompt)

    async def respond(self, request: Request, context: Any, n: int) -> Response:
        """Generate ``n`` answers to each prompt, and return the HTTP response to ``request``. If the client asked for
        fewer than ``n``, the response has only those with the highest scores. ``context``: context manager of the
        answers, as :meth:`Backend.answers` returns it.
        """
        self.n = n
        answers = await entered(
            context, self.asked.NAMES.get("max_completion_tokens", "max_tokens")
        )
        if self.asked.stream:
            return EventStream(self._stream(answers), context)
        try:
            written, thinking = await while_connected(request, self._collect(answers))
        finally:
            await context.__aexit__(None, None, None)
        usage = self._usage(
            answers,
            sum(event.token is not None for part in written for event in part.events),
            thinking,
        )
        kept = list[Answer]()
        for first in range(0, len(written), n):  # the best of each prompt's
            order = list(range(first, first + n))
            if n > self.asked.n:
                order.sort(key=lambda i: -answers.generations[i].score)
            kept += [written[i] for i in order[: self.asked.n]]
        return JSONResponse(self.replies.whole(kept, usage))

    def _readers(self, answers: AnswerEvents) -> list[AnswerReader]:
        return [
            AnswerReader(self.asked, self.tokenizer, self.form)
            for _ in answers.generations
        ]

    async def _pieces(
        self, answers: AnswerEvents, readers: list[AnswerReader]
    ) -> AsyncIterator[tuple[int, Answer]]:
        """Yield pairs of an answer's index and its new part: text that can be shown, and (parts of) tool calls."""
        left, fresh = set(range(len(readers))), set(range(len(readers)))
        while left:
            event = await answers.next()
            index = event.number
            if index not in left:
                continue  # written after its stop string had come
            self.watch.record(event, answers.generations[index])
            new, first = readers[index].read(event), index in fresh
            if self.echoes and first:
                new = self._echoed(new, index, answers)
            fresh.discard(index)
            if new.finish:
                left.discard(index)
                if not event.finished:
                    await answers.cancel(index)
            yield index, new

    def _echoed(self, new: Answer, index: int, answers: AnswerEvents) -> Answer:
        """Return the first part of an answer after its echoed prompt, with the prompt's log-probabilities."""
        ids = self.echoes[index // self.n]
        scores = [None, *answers.generations[index - index % self.n].prompt_scores]
        events = [
            TokenEvent(index, i, score, "")
            for i, score in zip(ids, scores, strict=False)
        ]
        return new._replace(text=self.tokenizer.decode(ids) + new.text, echo=events)

    def _usage(self, answers: AnswerEvents, written: int, thinking: int) -> Usage:
        return usage_of(
            self.prompt,
            written,
            sum(generation.hits for generation in answers.generations),
            thinking,
        )

    async def _collect(self, answers: AnswerEvents) -> tuple[list[Answer], int]:
        """Return the whole answers, and the number of reasoning tokens in them."""
        readers = self._readers(answers)
        whole = [Answer("", [], [], "") for _ in readers]
        async for index, new in self._pieces(answers, readers):
            whole[index] = whole[index].joined(new)
        return whole, sum(reader.thinking for reader in readers)

    async def _stream(self, answers: AnswerEvents) -> AsyncIterator[str]:
        began: set[int] = set()
        written = 0
        options = self.asked.stream_options
        counts = options.include_usage and options.continuous_usage_stats
        # events whose text cannot be shown yet, by answer
        held: dict[int, list[TokenEvent]] = {}
        try:
            for event in self.replies.begun():
                yield event_text(event)
            readers = self._readers(answers)
            async for index, new in self._pieces(answers, readers):
                events = held.setdefault(index, [])
                events += new.events
                written += sum(event.token is not None for event in new.events)
                if new.text or new.thought or new.calls or new.echo or new.finish:
                    new = new._replace(events=held.pop(index))
                    for event in self.replies.chunks(index, new, index not in began):
                        if counts and "choices" in event:
                            thinking = sum(reader.thinking for reader in readers)
                            event["usage"] = self._usage(answers, written, thinking)
                        yield event_text(event)
                    began.add(index)
            for event in self.replies.ended(
                self._usage(
                    answers, written, sum(reader.thinking for reader in readers)
                )
            ):
                yield event_text(event)
        except WeftError as error:
            yield event_text(self.replies.failed(refusal_of(error)))
        except Exception as error:
            # Nobody has foreseen it: the client is told before the connection ends with a traceback in the log.
            yield event_text(self.replies.failed(refusal_of(error)))
            yield self.replies.last
            raise
        yield self.replies.last


def replies_to(
    asked: SamplingRequest, model: str, tokenizer: Tokenizer, prompt: int
) -> Replies | ResponseReplies | MessageReplies:
    """Return the object that writes answers as JSON for the API of the request ``asked``: OpenAI's chat and
    completions, OpenAI's Responses, or Anthropic's. ``model``: the model's name in the answers. ``prompt``: number of
    prompt tokens.
    """
    if isinstance(asked, ResponsesRequest):
        return ResponseReplies(asked, model)
    return (
        MessageReplies(model, prompt)
        if isinstance(asked, MessagesRequest)
        else Replies(asked, model, tokenizer)
    )


class EventStream(StreamingResponse):
    """An HTTP response of server-sent events. ``chunks``: iterator over the texts of the events. ``context``: the
    asynchronous context manager of the answers, which is exited when the stream ends or the client disconnects.
    """

    def __init__(self, chunks: AsyncIterator[str], context: Any) -> None:
        super().__init__(
            chunks,
            media_type="text/event-stream",
            headers={"cache-control": "no-cache"},
        )
        self.context = context

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.context.__aexit__(None, None, None)


async def entered(context: Any, field: str) -> AnswerEvents:
    """Enter ``context``, a context manager that :meth:`Backend.answers` has returned, and return its answers. Raises
    :class:`Refusal` for a request that cannot be answered, such as one with more tokens than the cache holds.
    ``field``: the request field that this error names.
    """
    try:
        answers: AnswerEvents = await context.__aenter__()
    except UsageError as error:
        raise Refusal(400, f"{field}: {error}", param=field) from None
    except WeftError as error:
        raise refusal_of(error) from None
    return answers


def refusal_of(error: Exception) -> Refusal:
    """Return the refusal that a client gets because of ``error``. Its status is 400 for the client's mistake, 429 when
    the server is busy, and 5xx for a fault of the server.
    """
    if isinstance(error, Refusal):
        return error
    if isinstance(error, Busy):
        return Refusal(429, str(error), "busy")
    if isinstance(error, ServerEnding):
        return Refusal(503, str(error), "server_ends")
    if isinstance(error, NoEngine):
        return Refusal(503, str(error), NO_ENGINE)
    if isinstance(error, WeftError):
        return Refusal(400 if error.exit_code == 2 else 500, str(error))
    return Refusal(500, f"{type(error).__name__}: {error}")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` while the client of ``request`` is connected, and return its result. Raises
    :class:`ClientDisconnect` if the client disconnects first, and :class:`Refusal` for errors.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    except WeftError as error:
        raise refusal_of(error) from None
    finally:
        working.cancel()
        leaving.cancel()


async def left(request: Request) -> None:
    """Wait until the client of ``request`` has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event_text(what: dict[str, Any]) -> str:
    """Format the JSON object ``what`` as one server-sent event."""
    name = f"event: {what['type']}\n" if "type" in what else ""
    data = json.dumps(what, ensure_ascii=False).translate(LINE_ENDS)
    return f"{name}data: {data}\n\n"
