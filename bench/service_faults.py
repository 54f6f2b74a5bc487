"""Seeded faults while clients read streams: does each stream end complete, once, with the text of an undisturbed run?

A tiny model of random weights, float32. Its service is (``processes``) ``weft serve --engines 3``, or (``cluster``)
``weft serve --cluster FILE`` with engines that join through proxies of this program, which can stop, cut and half-close
what passes. Clients ask for greedy and sampled texts, several at once, with a form, with tools, and some hang up in the
middle. A client whose connection is cut, as the router is killed, asks again with the same Idempotency-Key. What is
expected is what a service of one engine writes when it has nothing else to do: each stream to its end, each token once.

    python bench/service_faults.py [--faults 40] [--seeds 2] [--first 0] [--clients 50] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from hosts import Host
from step import machine

from weft.data.tokenizer import load_tokenizer
from weft.layout.mesh import Mesh
from weft.models.hugging_face import export
from weft.net.sockets import listen
from weft.parallel.build import parallelize, resident_state
from weft.recipe import ModelShape, Train

SHAPE = ModelShape(
    vocab=257, layers=2, embed=32, heads=4, kv_heads=2, ffn=48, init_std=0.5
)
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}\n<tool_call>\n"
    '{{ {"name": f.name, "arguments": f.arguments} | tojson }}\n</tool_call>{% endfor %}\n{% endfor %}'
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

#: Kinds of faults by service: a process is killed or stopped for some seconds; what passes between engine and router is
#: cut, stopped (both ways, or one) or half-closed; an engine drains while another joins; the router is stopped, or
#: killed and started again; clients are cut off. ``cached`` is ``cluster`` with a cache engine, and with so little
#: cache that much is fetched.
KINDS = {
    "processes": ("kill", "freeze", "freeze router"),
    "cluster": ("kill", "freeze", "cut", "stall", "stall up", "stall down", "half-close", "drain and join",
                "freeze router", "kill router", "cut clients"),
    "cached": ("kill cache", "freeze cache", "kill", "freeze", "drain and join"),
}  # fmt: skip

#: Those that take long to recover from: their turn comes half as often.
LONG = ("kill router", "freeze router")

#: Seconds without a byte after which a stream counts as hanging, where each core has one process to run, and between
#: two faults at most.
HANGS_S, GAP_S = 60.0, 1.5


# --- what clients ask for ---


def cases() -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies of the requests."""
    asked: list[tuple[str, dict[str, Any]]] = []
    for i in range(6):
        body = {"prompt": f"text {i} " * (3 + 9 * i), "max_tokens": 120 + 30 * i}
        body |= {"ignore_eos": True, "temperature": 0}
        asked.append(("completions", body))
        sampled = {"temperature": 0.9, "seed": 7 * i, "top_p": 0.95}
        asked.append(("completions", body | sampled))
        asked.append(("completions", body | sampled | {"n": 2, "max_tokens": 100}))
        scored = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "seed": i}
        asked.append(("completions", body | scored | {"temperature": 0.7}))
    for i in range(3):
        said = {
            "messages": [{"role": "user", "content": f"say {i}"}],
            "max_tokens": 300,
            "seed": i,
        }
        form = {"structured_outputs": {"regex": "([a-f]{3,9} [0-9]{2,4}, ){15}[xyz]"}}
        asked.append(("chat/completions", said | form))
        schema = {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
        named = {"name": "pair", "schema": schema, "strict": True}
        form = {"response_format": {"type": "json_schema", "json_schema": named}}
        asked.append(("chat/completions", said | form))
        tool = {
            "type": "function",
            "function": {"name": "look_up", "parameters": schema},
        }
        asked.append(("chat/completions", said | {"tools": [tool], "tool_choice": "required"}))  # fmt: skip
    return asked


def patience() -> float:
    """Seconds after which a stream counts as hanging: the more, the more processes share a core."""
    return HANGS_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Unanswered(Exception):
    """Error of a request that was refused. ``status``: of HTTP."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


async def events(
    port: int, path: str, body: dict[str, Any], key: str = "", writers: set[asyncio.StreamWriter] | None = None
) -> AsyncIterator[dict[str, Any] | None]:  # fmt: skip
    """The chunks of a stream; None for its end. Raises OSError and EOFError when the connection ends before. ``key``:
    for the header Idempotency-Key; ``writers``: has the connection while it lasts.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    writers = set() if writers is None else writers
    writers.add(writer)
    try:
        text = json.dumps(body | {"model": "tiny", "stream": True}).encode()
        writer.write(
            f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
            f"idempotency-key: {key}\r\ncontent-length: {len(text)}\r\n\r\n".encode()
            + text
        )
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), patience())
        status = int(head.split()[1])
        if status != 200:
            raise Unanswered(status, (await reader.read(2000)).decode())
        buffer = b""
        while True:
            size = int(await asyncio.wait_for(reader.readline(), patience()) or "x", 16)
            piece = await asyncio.wait_for(reader.readexactly(size + 2), patience())
            if not size:
                return
            *whole, buffer = (buffer + piece[:-2]).split(b"\n\n")
            for event in whole:
                said = event.removeprefix(b"data: ")
                yield None if said == b"[DONE]" else json.loads(said)
    except ValueError as error:
        raise EOFError("the connection has ended") from error
    finally:
        writers.discard(writer)
        writer.close()


@dataclass(eq=False)
class Stream:
    """What a client has got: texts and ends by choice, and the times at which anything came."""

    case: int
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    done: int = 0
    error: str = ""

    def note(self, event: dict[str, Any] | None) -> None:
        self.times.append(time.monotonic())
        if event is None:
            self.done += 1
            return
        if "error" in event:
            self.error = str(event["error"])
        for choice in event.get("choices", []):
            at, delta = choice["index"], choice.get("delta", {})
            if at in self.ends:
                self.error = self.error or "something came after the end"
            text = choice.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                function = call["function"]
                text += f"{function.get('name') or ''}{function.get('arguments') or ''}"
            self.texts[at] = self.texts.get(at, "") + text
            if choice.get("finish_reason"):
                self.ends[at] = choice["finish_reason"]

    def equals(self, other: Stream) -> bool:
        return (self.texts, self.ends, self.done) == (other.texts, other.ends, 1)

    def begins(self, other: Stream) -> bool:
        """Whether each text is the beginning of the other's."""
        return all(other.texts[at].startswith(t) for at, t in self.texts.items())

    def extends(self, other: Stream) -> bool:
        """Whether each text begins with the other's, as far as this one goes."""
        return all(
            text.startswith(other.texts.get(at, "")[: len(text)])
            for at, text in self.texts.items()
        )

    def difference(self, other: Stream) -> str:
        """Say in what this stream differs from ``other``."""
        said = [f"ends {self.ends}, {self.done} times, not {other.ends}"]
        for at, text in self.texts.items():
            whole = other.texts.get(at, "")
            pairs = enumerate(zip(text, whole, strict=False))
            equal = next((i for i, (ours, theirs) in pairs if ours != theirs), len(text))  # fmt: skip
            if text != whole:
                said.append(
                    f"text {at} of {len(text)} characters, not {len(whole)}, differs from character {equal} on: "
                    f"{text[equal : equal + 20]!r}, not {whole[equal : equal + 20]!r}"
                )
        return "; ".join(said)


# --- proxies and processes ---


class Proxy:
    """Passes on what an engine and its router say. ``stalled``: directions in which nothing passes now."""

    def __init__(self, port: int) -> None:
        self.port, self.stalled = port, set[str]()
        self.writers: list[dict[str, asyncio.StreamWriter]] = []

    async def start(self) -> int:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        where: int = server.sockets[0].getsockname()[1]
        return where

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:  # as one does whose packets are lost
            try:
                above, to_router = await asyncio.open_connection("127.0.0.1", self.port)
                break
            except OSError:
                await asyncio.sleep(0.1)
        both = {"up": to_router, "down": writer}
        self.writers.append(both)
        with suppress(asyncio.CancelledError):  # the program ends
            await asyncio.gather(
                self._pass(reader, to_router, "up"), self._pass(above, writer, "down")
            )
        self.writers.remove(both)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
    ) -> None:
        # writing fails after half_close
        with suppress(OSError, RuntimeError):
            while data := await reader.read(1 << 16):
                while way in self.stalled:
                    await asyncio.sleep(0.02)
                writer.write(data)
                await writer.drain()
        with suppress(OSError):
            writer.close()

    def cut(self) -> None:
        for both in self.writers:
            for writer in both.values():
                writer.transport.abort()

    def half_close(self, way: str) -> None:
        for both in self.writers:
            with suppress(OSError, RuntimeError):
                both[way].write_eof()


def export_tiny(folder: Path) -> None:
    """Write the model of random weights to ``folder``/tiny, if it is not there."""
    folder.mkdir(exist_ok=True)
    if (folder / "tiny").exists():
        return
    model = parallelize(SHAPE, Mesh.single(), Train(seed=2))[0]
    files = replace(load_tokenizer("bytes"), chat_template=TEMPLATE).files()
    weights = {p.name: p.local for p in resident_state(model, model.mesh).held}
    export(weights, SHAPE, folder / "tiny", files=files)


def free_port() -> int:
    with listen("127.0.0.1", 0) as sock:
        port: int = sock.getsockname()[1]
    return port


class Processes:
    """The processes of a service. ``folder``: where model and logs are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.expected: set[tuple[str, int]] = set()

    def start(
        self, name: str, *words: str, at: Host | None = None
    ) -> subprocess.Popen[bytes]:
        """Start ``weft`` with these words, if need be ``at`` another host."""
        log = (self.folder / f"{name}.log").open("ab")
        command = [sys.executable, "-m", "weft", *words]
        if at is not None:
            command = at.command(command)
        environment = os.environ | {"WEFT_SECRET": "of the faults"}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.all.append((name, process))
        return process

    def expect(self, name: str, code: int) -> None:
        """Take it for right that ``name`` ends with this exit code."""
        self.expected.add((name, code))

    def close(self) -> list[str]:
        """End all, first by SIGINT; return what those did that did not end as they should."""
        wrong = []
        for _, process in reversed(self.all):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGINT)
        for name, process in self.all:
            try:
                code = process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                wrong.append(f"{name} does not end")
                continue
            clean = (0, -signal.SIGKILL, 128 + signal.SIGINT)  # the last as it starts
            if code not in clean and (name, code) not in self.expected:
                wrong.append(f"{name} ends with {code}")
        for log in self.folder.glob("*.log"):
            if "Traceback" in log.read_text(errors="replace"):
                wrong.append(f"a traceback in {log.name}")
        return wrong


async def metrics_text(port: int) -> str:
    """What /metrics says; "" if nobody answers."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
        text = (await asyncio.wait_for(reader.read(-1), 20)).decode()
        writer.close()
    except (OSError, TimeoutError):
        return ""
    return text


async def metrics(port: int) -> dict[str, float]:
    """The counters of /metrics of all engines together."""
    text = await metrics_text(port)
    return {name: float(value) for name, value in re.findall(r"(?m)^weft_(\w+)_total (\S+)$", text)}  # fmt: skip


async def scraped(port: int) -> dict[str, dict[str, float]]:
    """Numbers of /metrics by engine; none if nobody answers."""
    text = await metrics_text(port)
    engines: dict[str, dict[str, float]] = {}
    for name, engine, value in re.findall(r'weft_(\w+)\{engine="([^"]+)"\} (\S+)', text):  # fmt: skip
        engines.setdefault(engine, {})[name] = float(value)
    return engines


async def until(come: Callable[[], Any], seconds: float, every: float = 0.2) -> bool:
    """Wait for what ``come`` awaits to be true, at most so many ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if await come():
            return True
        await asyncio.sleep(every)
    return False


# --- a service under faults ---


class Service:
    """A service of three engines, and how its processes are found."""

    def __init__(self, kind: str, folder: Path, engines: int = 3) -> None:
        self.kind, self.folder, self.count = kind, folder, engines
        self.processes = Processes(folder)
        self.port, self.inner = free_port(), free_port()
        self.words = ["--checkpoint", str(folder / "tiny"), "--cache", "32768"]
        # float32 as it is: else a draw between two tokens may depend on the batch
        self.words += ["--requests", "64", "--invariant"]
        self.engines: dict[str, subprocess.Popen[bytes]] = {}
        self.proxies: dict[str, Proxy] = {}
        self.ports: dict[str, int] = {}
        self.drained: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.router: subprocess.Popen[bytes]
        self.frozen: dict[int, float] = {}
        self.next = 0
        self.joins = kind in ("cluster", "cached")
        if kind == "cached":
            self.words[self.words.index("32768")] = "6144"

    async def start(self) -> None:
        self.start_router()
        if self.joins:
            for _ in range(self.count):
                await self.add_engine()
        if self.kind == "cached":
            self.start_cache()
        await self.joined(self.count + (self.kind == "cached"), 180)

    def start_router(self) -> None:
        own = ["--engines", str(self.count)]
        if self.kind == "alone":
            own = []
        if self.joins:
            file = self.folder / "cluster.toml"
            # a process may take minutes to start on a machine that others share
            limits = "limits = { patience = 600 }"
            file.write_text(f'[cluster]\nlisten = "127.0.0.1:{self.inner}"\n{limits}\n')
            own = ["--cluster", str(file)]
        self.router = self.processes.start(
            f"{self.kind}-router", "serve", *self.words, *own, "--port", str(self.port)
        )

    async def add_engine(self) -> None:
        name, self.next = f"engine-{self.next}", self.next + 1
        self.proxies[name] = Proxy(self.inner)
        self.ports[name] = await self.proxies[name].start()
        self.start_engine(name)

    def start_engine(self, name: str) -> None:
        join = ["--join", f"127.0.0.1:{self.ports[name]}", "--name", name]
        self.engines[name] = self.processes.start(
            name, "engine", *self.words, *join, "--redial", "180", "--drain", "5"
        )

    def start_cache(self) -> None:
        join = ["--join", f"127.0.0.1:{self.inner}", "--name", "cache", "--redial", "180"]  # fmt: skip
        words = ["--checkpoint", str(self.folder / "tiny"), "--role", "cache", "--host-cache", "0.05"]  # fmt: skip
        self.engines["cache"] = self.processes.start("cache", "engine", *words, *join)  # fmt: skip

    async def joined(self, engines: int, seconds: float) -> bool:
        async def enough() -> bool:
            return len(await scraped(self.port)) >= engines

        return await until(enough, seconds)

    def pid(self, name: str) -> int:
        """The process of an engine that serves, or 0 if it is just started again."""
        if self.joins:
            return self.engines[name].pid
        listed = subprocess.run(
            ["pgrep", "-P", str(self.router.pid), "-f", "--", f"--name={name} "],
            capture_output=True,
            text=True,
        )
        return int((listed.stdout.split() or ["0"])[0])

    async def freeze(self, pid: int, seconds: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    async def stall(self, name: str, ways: set[str], seconds: float) -> None:
        proxy = self.proxies[name]
        proxy.stalled |= ways
        await asyncio.sleep(seconds)
        proxy.stalled -= ways


class Trial:
    """A service under so many seeded faults, with clients. ``expected``: texts and ends by case."""

    def __init__(
        self, service: Any, seed: int, expected: list[Stream], clients: int
    ) -> None:
        self.service, self.expected, self.clients = service, expected, clients
        self.rng, self.seed = random.Random(seed), seed
        self.active: set[Stream] = set()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.ended = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.rows: list[dict[str, Any]] = []
        self.asked: Sequence[int] = range(
            len(expected)
        )  # the cases that clients ask for
        self.harms: list[float] = []  # to clients' connections
        self.writers: set[asyncio.StreamWriter] = set()
        self.lines: list[tuple[float, str]] = []  # of the router, with their times
        self.loads: list[float] = []

    async def run(self, faults: int) -> None:
        clients = [asyncio.create_task(self.client(i)) for i in range(self.clients)]
        watching = asyncio.create_task(self.watch())
        await asyncio.sleep(3)
        kinds = [*KINDS[self.service.kind] * 2]
        for kind in {*LONG} & {*kinds}:
            kinds.remove(kind)
        order = (kinds * (faults // len(kinds) + 1))[:faults]
        self.rng.shuffle(order)
        for kind in order:
            await self._fault(kind)
        await asyncio.gather(*self.tasks)
        self.ended = True
        late = 0
        for client in asyncio.as_completed(clients, timeout=2 * patience()):
            try:
                await client
            except TimeoutError:
                late += 1
        if late:
            self.wrong.append(f"{late} clients do not end")

        async def empty() -> bool:
            engines = await scraped(self.service.port)
            names = ("requests_running", "requests_waiting", "cache_blocks_used")
            # blocks that a cache engine keeps are nobody's
            rows = [row for name, row in engines.items() if name != "cache"]
            return bool(rows) and not any(row[name] for row in rows for name in names)

        watching.cancel()
        pattern = r'(?m)^weft_kept_blocks_fetched_total\{engine="[^"]+",source="caches"\} (\S+)$'
        fetched = re.findall(pattern, await metrics_text(self.service.port))
        if fetched:  # by engines that are still there
            self.counts["blocks fetched from cache engines"] = round(sum(map(float, fetched)))  # fmt: skip
        if not await until(empty, 30):
            self.wrong.append(
                f"engines are not empty: {await scraped(self.service.port)}"
            )
        for name, process in self.service.drained:
            try:
                code = process.wait(30)
            except subprocess.TimeoutExpired:
                code = None
            if code:
                self.wrong.append(f"{name} was drained and ended with {code}")

    async def watch(self) -> None:
        """Note what the router says, and the load of the machine."""
        log = (self.service.folder / f"{self.service.kind}-router.log").open()
        log.seek(0, os.SEEK_END)
        for looks in count():
            for line in log:
                self.lines.append((time.monotonic(), line))
            if looks % 250 == 0:
                self.loads.append(os.getloadavg()[0])
            await asyncio.sleep(0.02)

    async def client(self, number: int) -> None:
        rng = random.Random(1000 * self.seed + number)
        for i in count():
            if self.ended:
                break
            await self._ask(rng, f"{self.seed}-{number}-{i}")

    async def _ask(self, rng: random.Random, key: str) -> None:
        """Ask for a text until it is there, also if the connection is cut."""
        case = rng.choice(self.asked)
        leaves = rng.randrange(5, 100) if rng.random() < 0.15 else 0
        begun, before = time.monotonic(), Stream(case)
        self.counts["asked"] += 1
        while time.monotonic() < begun + patience():
            stream = Stream(case)
            end = await self._read(stream, key, leaves)
            if not stream.extends(before):
                self.wrong.append(f"case {case} differs when asked again: {stream.difference(before)}")  # fmt: skip
            if end == "refused":  # while no engine or router is there
                await asyncio.sleep(0.3)
            elif end == "cut":
                self.counts["asked again after a cut"] += 1
                before = stream
                await asyncio.sleep(0.3)
            else:
                self.counts[end] += 1
                self.counts["complete after a cut"] += bool(before.times) and end == "complete"  # fmt: skip
                return
        self.wrong.append(f"case {case} was not answered for {patience():.0f} s")

    async def _read(self, stream: Stream, key: str, leaves: int) -> str:
        """Read a stream, and return how it has ended: complete, hung up, refused, cut or wrong."""
        path, body = cases()[stream.case]
        self.active.add(stream)
        asked = time.monotonic()
        try:
            async for event in events(self.service.port, path, body, key, self.writers):
                stream.note(event)
                if leaves and len(stream.times) > leaves:
                    break
        except Unanswered as error:
            if error.status != 503:
                self.wrong.append(f"case {stream.case}: {error.status} {error}")
            return "refused"
        except ConnectionRefusedError:
            return "refused"
        except TimeoutError:
            self.wrong.append(f"case {stream.case} hangs after {len(stream.times)} chunks")  # fmt: skip
            return "wrong"
        except (OSError, EOFError) as error:
            self._check(stream, whole=False)
            if not any(at > asked - 1 for at in self.harms):
                self.wrong.append(f"case {stream.case} is cut: {error!r}")
            return "cut"
        finally:
            self.active.discard(stream)
        hung_up = bool(leaves) and not stream.done
        whole = self._check(stream, whole=not hung_up)
        return "wrong" if not whole else "hung up" if hung_up else "complete"

    def _check(self, stream: Stream, whole: bool) -> bool:
        expected, about = self.expected[stream.case], f"case {stream.case}"
        wrong = len(self.wrong)
        if stream.error:
            self.wrong.append(f"{about}: {stream.error}")
        elif whole and not stream.equals(expected):
            self.wrong.append(f"{about}: {stream.difference(expected)}")
        elif not stream.begins(expected):
            self.wrong.append(f"{about}, cut: {stream.difference(expected)}")
        return len(self.wrong) == wrong

    async def _fault(self, kind: str) -> None:
        service, rng = self.service, self.rng
        await service.joined(2, 8)
        await asyncio.sleep(rng.uniform(0.3, GAP_S))
        engines = await scraped(service.port)
        able = sorted(name for name, row in engines.items() if not row["engine_draining"])  # fmt: skip
        if service.joins:
            able = [name for name in able if name in service.engines]
        if service.kind == "cached":
            able = [n for n in able if (n == "cache") == kind.endswith("cache")]
        pids = {name: pid for name in able if (pid := service.pid(name))}
        if not pids:
            self.counts["nobody to harm"] += 1
            return
        name = rng.choice(sorted(pids))
        row = engines[name]
        lost = int(row["requests_running"] + row["requests_waiting"])
        if name == "cache":  # of which every answer may wait for a block
            lost = len(self.active)
        seconds = round(rng.uniform(1, 6), 2)
        at, reading = time.monotonic(), [*self.active]
        self._start(kind, name, pids[name], seconds)
        self.tasks.add(asyncio.create_task(self._measure(kind, name, seconds, at, reading, lost)))  # fmt: skip

    def _start(self, kind: str, name: str, pid: int, seconds: float) -> None:
        service = self.service
        if kind in ("kill", "kill cache"):
            os.kill(pid, signal.SIGKILL)
            if name == "cache":
                service.start_cache()
            elif service.joins:
                service.start_engine(name)
        elif kind in ("freeze", "freeze cache"):
            self.tasks.add(asyncio.create_task(service.freeze(pid, seconds)))
        elif kind == "cut":
            service.proxies[name].cut()
        elif kind.startswith("stall"):
            ways = {kind[6:]} if kind[6:] else {"up", "down"}
            self.tasks.add(asyncio.create_task(service.stall(name, ways, seconds)))
        elif kind == "half-close":
            service.proxies[name].half_close(self.rng.choice(["up", "down"]))
        elif kind == "drain and join":
            service.drained.append((name, service.engines.pop(name)))
            os.kill(pid, signal.SIGTERM)
            self.tasks.add(asyncio.create_task(service.add_engine()))
        elif kind == "kill router":
            self.harms.append(time.monotonic())
            service.router.kill()
            service.router.wait()
            service.start_router()
        elif kind == "freeze router":
            pid = service.router.pid
            self.tasks.add(asyncio.create_task(service.freeze(pid, seconds)))
        elif kind == "cut clients":
            self.harms.append(time.monotonic())
            for writer in self.rng.sample([*self.writers], len(self.writers) // 2):
                writer.transport.abort()

    async def _measure(
        self, kind: str, name: str, seconds: float, at: float, reading: list[Stream], lost: int
    ) -> None:  # fmt: skip
        """Note how long those who read had to wait for what comes next. The engine had ``lost`` answers: theirs are
        the longest waits. After the router's death: until anything comes again.
        """

        def waits() -> list[float]:
            after = [next((t for t in s.times if t > at), None) for s in reading]
            return sorted((t - at for t in after if t is not None), reverse=True)

        if kind == "kill router":
            while not any(s.times and s.times[0] > at and s not in reading for s in self.active):  # fmt: skip
                await asyncio.sleep(0.05)
            first = min(s.times[0] for s in self.active if s.times and s.times[0] > at)
            affected = [first - at]
        else:
            deadline = at + patience()
            while time.monotonic() < deadline and any(
                s in self.active and not (s.times and s.times[-1] > at) for s in reading
            ):
                await asyncio.sleep(0.05)
            affected = waits()[:lost]
        if kind.endswith("router"):
            name = "router"
        said = {"cut clients": "", "drain and join": f"engine {name} drains"}
        sign = said.get(kind, f"engine {name} is given up")
        noticed = [t - at for t, line in self.lines if sign and sign in line and at <= t < at + 10]  # fmt: skip
        self.rows.append(
            {
                "kind": kind,
                "engine": name,
                "seconds": seconds,
                "answers": lost,
                "noticed_s": round(noticed[0], 3) if noticed else None,
                "waits_s": [round(wait, 3) for wait in affected],
            }
        )
        worst = max(affected, default=0)
        said = f"{lost:3} answers, worst wait {worst:6.2f} s; {len(self.wrong)} wrong"
        print(f"  {kind:15} {name:10} {said}", flush=True)


async def undisturbed(folder: Path) -> list[Stream]:
    """What a service of one engine writes for each case, one after another."""
    service = Service("alone", folder)
    try:
        service.start_router()

        async def up() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", service.port)
            except OSError:
                return False
            writer.close()
            return True

        assert await until(up, 120), (folder / "alone-router.log").read_text()
        streams = []
        for i, (path, body) in enumerate(cases()):
            stream = Stream(i)
            async for event in events(service.port, path, body):
                stream.note(event)
            assert stream.done == 1 and not stream.error, (i, stream)
            streams.append(stream)
    finally:
        service.processes.close()
    return streams


async def trial(
    kind: str, seed: int, folder: Path, expected: list[Stream], given: argparse.Namespace
) -> dict[str, Any]:  # fmt: skip
    service = Service(kind, folder)
    attempt = Trial(service, seed, expected, given.clients)
    print(f"{kind}, seed {seed}", flush=True)
    try:
        await service.start()
        await attempt.run(given.faults)
    finally:
        attempt.wrong += service.processes.close()
    for line in attempt.wrong:
        print("  WRONG", line[:1000], flush=True)
    print(f"  {dict(attempt.counts)}", flush=True)
    return {
        "service": kind,
        "seed": seed,
        "streams": attempt.counts,
        "load": [round(value, 1) for value in attempt.loads],
        "wrong": attempt.wrong,
        "faults": attempt.rows,
    }


def summary(trials: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Seconds until the router has noticed a fault, and until the next token of the streams that it touched, by kind of
    fault. Faults that were over before anybody had to notice them, as short stops are, count in the second alone.
    """
    rows = [row for each in trials for row in each["faults"]]
    kinds = sorted({row["kind"] for row in rows})
    of = {kind: [row for row in rows if row["kind"] == kind] for kind in kinds}
    return {
        kind: {
            "faults": len(of[kind]),
            "streams": sum(len(row["waits_s"]) for row in of[kind]),
            "noticed": spread([row["noticed_s"] for row in of[kind] if row["noticed_s"] is not None]),
            "until_next_token": spread([wait for row in of[kind] for wait in row["waits_s"]]),
        }
        for kind in kinds
    }  # fmt: skip


def spread(seconds: list[float]) -> dict[str, float]:
    """Number, median, 99th percentile and maximum."""
    if not seconds:
        return {"count": 0}
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "median_s": round(statistics.median(ordered), 2),
        "p99_s": round(ordered[int(0.99 * len(ordered))], 2),
        "max_s": round(ordered[-1], 2),
    }


def read_expected(folder: Path) -> list[Stream]:
    """What an earlier run has left in ``folder``; empty if nothing."""
    file = folder / "expected.json"
    rows = json.loads(file.read_text()) if file.exists() else []
    return [
        Stream(i, dict(enumerate(texts)), dict(enumerate(ends)), done=1)
        for i, (texts, ends) in enumerate(rows)
    ]


def write_expected(folder: Path, expected: list[Stream]) -> None:
    rows = [
        [[values[at] for at in sorted(values)] for values in (s.texts, s.ends)]
        for s in expected
    ]
    (folder / "expected.json").write_text(json.dumps(rows))


def brief(row: dict[str, Any]) -> dict[str, Any]:
    """A fault with the longest of the waits alone."""
    waits = row["waits_s"]
    kept = {name: value for name, value in row.items() if name != "waits_s"}
    return kept | {"worst_s": max(waits, default=None)}


def report(trials: list[dict[str, Any]], given: argparse.Namespace) -> None:
    """Print figures of the trials so far, and write them to the file."""
    loads = [value for each in trials for value in each["load"]]
    result = {
        "machine": machine(),
        "clients": given.clients,
        "faults": sum(len(each["faults"]) for each in trials),
        "load": {"mean": round(statistics.mean(loads), 1), "most": max(loads)},
        "streams": sum((each["streams"] for each in trials), Counter()),
        "wrong": sum(len(each["wrong"]) for each in trials),
        "by_kind": summary(trials),
        "trials": [each | {"faults": [brief(row) for row in each["faults"]]} for each in trials],
    }  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "trials"}, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=40, help="of each trial")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="seed of the first trial")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--services", nargs="*", default=[*KINDS])
    parser.add_argument("--keep", type=Path, help="a folder for model and logs")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        export_tiny(folder)
        expected = read_expected(folder) or asyncio.run(undisturbed(folder))
        write_expected(folder, expected)
        print(f"{len(expected)} cases, {sum(len(s.times) for s in expected)} chunks", flush=True)  # fmt: skip
        trials = []
        for seed in range(given.first, given.first + given.seeds):
            for kind in given.services:
                trials.append(asyncio.run(trial(kind, seed, folder, expected, given)))
                report(trials, given)
    return any(each["wrong"] for each in trials)


if __name__ == "__main__":
    sys.exit(main())
