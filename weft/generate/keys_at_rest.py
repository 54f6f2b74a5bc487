"""Old keys and values in files, each of which a process owns that also attends to them (InstInfer, 2409.04992).

An engine lends the full blocks of its texts to these processes as soon as they fill a run of the file
(:mod:`weft.generate.key_file`), by the way by which engines lend blocks to each other
(:mod:`weft.generate.lending`). Its own cache holds only the newest blocks of each text, however long the text is. Per
layer the queries go to the processes, and partial attention with log-sum-exps comes back, which merges exactly. A
process that is lost is started again, and the texts whose keys it had are computed again.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from weft.errors import UsageError, WeftError
from weft.generate.block_contents import tensor_bytes, tensor_of
from weft.generate.engine import Engine, LoanUsage
from weft.generate.key_file import CALLED, KeyLayout, layout_of
from weft.generate.key_owner import run_owner
from weft.generate.lending import Borrower, NoRoom, check_lending, lent_blocks
from weft.generate.reader import PagedReader
from weft.generate.request import Request
from weft.memory.nameless_file import check_file_folder
from weft.models.borrowed_keys import BlockLender, LenderLost, LentQuery, Partial
from weft.models.numbers import wide
from weft.net.child_pipe import PipeEnd, RunningProcess, call_in_child, open_child

T = torch.Tensor

#: Seconds in which an owner must start, and within which it must answer.
START_S, ANSWER_S = 300.0, 60.0
#: Times that owners of a folder may end, until that is an error.
TRIES = 3
#: GB of each folder's file if nothing else is said, and the share of the free memory for pages of the files.
FILE_GB, CACHED_SHARE = 20.0, 0.5

#: Starts an owner with its end of a pipe.
OwnerStarter = Callable[[PipeEnd], RunningProcess]


@dataclass(frozen=True)
class RestingKeys:
    """The value of the option ``--keys-in``: files in which the keys and values of old tokens rest.

    Attributes:
        ``folders``: a folder for each file, best each on a disk of its own.
        ``size``: GB of each file; None: as much as the texts need, or :data:`FILE_GB` if this is not known.
        ``cached``: GB of the files that are read through the page cache; None: :data:`CACHED_SHARE` of the memory that
            is free at the start.
        ``rate``: tokens per second of the longest text for which the disks must be fast enough; 0: any speed will do.
    """

    folders: tuple[Path, ...]
    size: float | None = None
    cached: float | None = None
    rate: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "RestingKeys":
        """Return the settings that the option's ``text`` gives, such as ``/disk``, or
        ``/disk1,/disk2,size=40,cached=2,rate=5``. Raises :class:`UsageError` for a folder that this computer does not
        have, and for unknown settings.
        """
        numbers: dict[str, float] = {}
        folders = []
        for word in (part.strip() for part in text.split(",")):
            name, equals, value = word.partition("=")
            if not word or "://" in word:
                raise UsageError(
                    f"{CALLED} {text} is no folder of this computer; give one on a local disk"
                )
            if not equals:
                folders.append(Path(word))
                continue
            try:
                numbers[name] = float(value)
            except ValueError:
                numbers[name] = -1.0
            if name not in ("size", "cached", "rate") or not 0 <= numbers[name] < float(
                "inf"
            ):
                raise UsageError(
                    f"{CALLED}: {word!r} is no setting; give size=GB, cached=GB or rate=TOKENS"
                )
        if not folders:
            raise UsageError(
                f"{CALLED} {text} names no folder; give one on a local disk first"
            )
        return cls(tuple(folders), **numbers)

    def check_folders(self) -> None:
        """Raise :class:`WeftError` for a folder that can have no file. Missing folders are created.

        Commands call it before they open a model, whose weights take long to read.
        """
        for folder in self.folders:
            check_file_folder(folder, f"{CALLED} = {str(folder)!r}")


class RunPlace(NamedTuple):
    """Place in the file of cache blocks that were written together (a loan). The file is cut into extents of equal
    size, and each extent into runs of blocks. ``extent``, ``run``: number of the extent, and of the run in it.
    ``blocks``: number of these blocks.
    """

    extent: int
    run: int
    blocks: int


class KeyOwner:
    """Starts a process that owns a file in ``folder`` with keys and values of this engine's old tokens, and sends
    requests to this process. Cache blocks that were written together form a loan, whose number names them in later
    calls. ``layout``: where keys and values lie in the file. ``extents``: number of equal pieces (extents) into
    which the file is divided. ``cached``: how many of them are read through the page cache. ``measured``: whether
    the disk's speed is measured. ``start``: function that starts the process. Raises :class:`WeftError` if the file
    cannot be made.

    Attributes:
        ``note``: the file's warning, or "".
        ``rate``: bytes that the disk reads in a second; 0 if it was not measured.
        ``lost``: whether the process has ended or does not answer; it is never asked again.
        ``fate``: how the process was lost, in words; "" while it answers.
        ``moved``: bytes of queries and partial attentions so far.
        ``sent``: bytes of cache blocks so far.
        ``asks``: number of messages with queries so far; one message has the queries of one layer.
    """

    def __init__(
        self, folder: Path, layout: KeyLayout, extents: int, cached: int, measured: bool = False,
        start: OwnerStarter | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.layout, self.extents = folder, layout, extents
        self.lost, self.fate = False, ""
        self.moved = self.sent = self.asks = 0
        self._places: dict[int, RunPlace] = {}
        self._used: dict[int, set[int]] = {}
        self._numbers, self._messages = count(), count()
        self._awaited: set[int] = set()
        child = open_child(start or _start_interpreter)
        self._pipe, self._process = child.pipe, child.process
        about = {
            "folder": str(folder), "layers": [each.form for each in layout.layers], "size": layout.size,
            "blocks": layout.blocks, "runs": layout.runs, "extents": extents, "cached": cached,
            "threads": torch.get_num_threads(), "measure": measured and cached < extents,
        }  # fmt: skip
        try:
            self._pipe.send_bytes(json.dumps(about).encode())
            said = self._message(START_S)
        except (OSError, EOFError, TimeoutError) as error:
            raise WeftError(self._bury(error)) from None
        if "error" in said:
            self._bury(OSError())
            raise WeftError(said["error"])
        self.note, self.rate = said["note"], said["rate"]

    @property
    def pid(self) -> int | None:
        """Operating-system number of the process that owns the file; None if it has none."""
        return getattr(self._process, "pid", None)

    def room(self) -> int:
        """Return for how many further cache blocks the file has room; 0 if the process that owns the file is lost."""
        if self.lost:
            return 0
        free = (self.extents - len(self._used)) * self.layout.runs
        free += sum(self.layout.runs - len(used) for used in self._used.values())
        return free * self.layout.blocks

    def recalled(self) -> list[int]:
        """Return an empty list: a file never needs its blocks for itself, unlike an engine that lends blocks and
        recalls loans.
        """
        return []

    def put(self, contents: T, after: int | None) -> int:
        """Write cache blocks of a text to the file, through the process that owns it. Return a number (of the loan)
        that names these blocks in later calls.

        ``contents``: uint8 ``[blocks, bytes]``, at most :attr:`KeyLayout.blocks` blocks. ``after``: number of the loan
        with the blocks of the same text before these; the new blocks are written directly behind them if there is room.
        None: this file has no earlier blocks of the text. Raises :class:`NoRoom` if the file is full, and
        :class:`LenderLost`.
        """
        place = RunPlace(*self._free_run(after), len(contents))
        head = {
            "do": "write",
            "extent": place.extent,
            "run": place.run,
            "blocks": len(contents),
        }
        self._send(head, [tensor_bytes(contents)])
        self._used.setdefault(place.extent, set()).add(place.run)
        self.sent += contents.nbytes
        loan = next(self._numbers)
        self._places[loan] = place
        return loan

    def take(self, contents: T) -> int:
        """Write the cache blocks ``contents``, uint8 ``[blocks, bytes]``, to any free place of the file, through the
        process that owns it. Return a number (of the loan) that names these blocks in later calls. Raises
        :class:`NoRoom` if the file is full, and :class:`LenderLost`.
        """
        return self.put(contents, None)

    def fetch(self, loan: int) -> T:
        """Read cache blocks back from the file: uint8 ``[blocks, bytes]``.

        ``loan``: number that :meth:`put` or :meth:`take` returned for these blocks. Raises :class:`LenderLost` if the
        process that owns the file does not answer.
        """
        extent, run, blocks = self._places[loan]
        head = {"do": "fetch", "extent": extent, "run": run, "blocks": blocks}
        number = self._send(head, [])
        self._awaited.add(number)
        (contents,) = self._wait(number)[1]
        self.sent += len(contents)
        return tensor_of(contents, torch.uint8, (blocks, -1))

    def drop(self, loan: int) -> None:
        """Free the room of the cache blocks that were written as the loan number ``loan``: later blocks may overwrite
        them.
        """
        if place := self._places.pop(loan, None):
            self._used[place.extent].discard(place.run)
            if not self._used[place.extent]:
                del self._used[place.extent]

    def ask(
        self, layer: int, queries: Sequence[LentQuery], q: T, window: int
    ) -> Callable[[], Partial]:
        """Send the queries ``q`` ``[queries, heads, width]`` of ``layer``. Return a function that waits for their
        attention to the keys in the file.

        ``queries``: for each text, which rows of ``q`` are its queries, and to which loans they attend. ``window``:
        number of tokens that a token sees, itself included; 0: all.
        """
        places = [
            [first, last, past, self._stretches(parts)]
            for first, last, past, parts in queries
        ]
        head = {
            "do": "attend",
            "layer": layer,
            "queries": places,
            "window": window,
            "shape": [*q.shape],
        }
        number = self._send(head, [tensor_bytes(q.cpu())])
        self._awaited.add(number)
        self.asks += 1

        def partial() -> Partial:
            out, lse = self._wait(number)[1]
            self.moved += q.nbytes + len(out) + len(lse)
            dtype = wide(q.dtype)
            return tensor_of(out, dtype, q.shape), tensor_of(lse, dtype, q.shape[:2])

        return partial

    def counts(self) -> dict[str, int]:
        """Return byte counts of the process that owns the file, by name: bytes read, bytes written, and the process's
        own memory. Raises :class:`LenderLost` if it does not answer.
        """
        number = self._send({"do": "counts"}, [])
        self._awaited.add(number)
        counts: dict[str, int] = self._wait(number)[0]["counts"]
        return counts

    def close(self) -> None:
        """End the process that owns the file. The operating system then deletes the file."""
        self._bury(OSError())

    def is_last(self, loan: int) -> bool:
        """Return whether the cache blocks of the loan number ``loan`` are the last in their contiguous piece of the
        file (their extent). The text's next blocks then go to another extent, which may be in another file.
        """
        return self._places[loan].run + 1 == self.layout.runs

    def _stretches(self, parts: Sequence[Any]) -> list[list[int]]:
        """The stretches of a text's tokens that lie behind each other in an extent."""
        stretches: list[list[int]] = []
        end_run, tokens = -1, self.layout.tokens
        for loan, begin, end in parts:
            extent, run, _ = self._places[loan]
            last = stretches[-1] if stretches else None
            whole = last is not None and (last[3] - last[2]) % tokens == 0
            if (
                last is not None
                and whole
                and last[0] == extent
                and run == end_run
                and begin == last[3]
            ):
                last[3] = end
            else:
                stretches.append([extent, run, begin, end])
            end_run = run + 1
        return stretches

    def _free_run(self, after: int | None) -> tuple[int, int]:
        """The extent and the number of a free run, behind the loan ``after`` if that can be."""
        if after is not None:
            extent, run, _ = self._places[after]
            if run + 1 < self.layout.runs and run + 1 not in self._used[extent]:
                return (extent, run + 1)
        fresh = next(
            (extent for extent in range(self.extents) if extent not in self._used), None
        )
        if fresh is not None:
            return (fresh, 0)
        for extent, used in self._used.items():  # room that other texts have left
            free = next(
                (run for run in range(self.layout.runs) if run not in used), None
            )
            if free is not None:
                return (extent, free)
        raise NoRoom(f"the file in {self.folder} is full")

    def _send(self, head: dict[str, Any], payload: Sequence[memoryview]) -> int:
        """Send a message; return its number. Answers that nobody has read are read first, as the process would wait for
        that.
        """
        if self.lost:
            raise LenderLost(self, self.fate)
        number = next(self._messages)
        try:
            while self._awaited:
                self._receive()
            self._pipe.send_bytes(
                json.dumps(head | {"number": number, "bytes": len(payload)}).encode()
            )
            for part in payload:
                self._pipe.send_bytes(part)
        except (OSError, EOFError, TimeoutError) as error:
            raise LenderLost(self, self._bury(error)) from None
        return number

    def _wait(self, number: int) -> tuple[dict[str, Any], list[memoryview]]:
        if self.lost:
            raise LenderLost(self, self.fate)
        try:
            while True:
                head, parts = self._receive()
                if head["number"] == number:
                    return head, parts
        except (OSError, EOFError, TimeoutError) as error:
            raise LenderLost(self, self._bury(error)) from None

    def _receive(self) -> tuple[dict[str, Any], list[memoryview]]:
        head = self._message(ANSWER_S)
        if "error" in head:
            raise OSError(head["error"])
        parts = [
            memoryview(bytearray(self._pipe.recv_bytes())) for _ in range(head["bytes"])
        ]
        self._awaited.discard(head["number"])
        return head, parts

    def _message(self, seconds: float) -> dict[str, Any]:
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"no answer within {seconds:g} s")
        head: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        return head

    def _bury(self, error: Exception) -> str:
        """Make sure that the process is gone; return why."""
        self.lost = True
        self._pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(
                0.5
            )  # its own exit code says more than that it was killed
        # an error of the pipe says less than how the process has ended
        said = str(error) if getattr(error, "errno", None) is None else ""
        said = said or f"exit code {self._process.poll()}"
        self.fate = (
            f"the process {self.pid} that owns keys in {self.folder} has ended ({said})"
        )
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # it waits for its disk
            self._process.wait(5)
        return self.fate


def _start_interpreter(pipe: PipeEnd) -> RunningProcess:
    return call_in_child(
        "weft.generate.key_owner", run_owner.__name__, pipe, stdout=sys.stderr
    )


class KeysAtRest:
    """Moves the full cache blocks of all texts of ``engine`` to the files of ``owners``, a fixed number of blocks (a
    run, :class:`KeyLayout`) at a time. ``again``: function that starts a new owner in place of a lost one. ``say``
    prints a line.
    """

    def __init__(
        self, engine: Engine, owners: Sequence[KeyOwner], again: Callable[[KeyOwner], KeyOwner],
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.engine, self.owners, self._again, self._say = engine, [*owners], again, say
        self.layout = owners[0].layout
        self._failures: Counter[Path] = Counter()
        most = sum(owner.room() for owner in owners)
        self.borrower = Borrower(engine, lambda: (), most)
        scheduler = engine.scheduler
        scheduler.relief.append(self.relieve)
        scheduler.lendable = self.room
        engine.loans.append(self)

    def room(self) -> int:
        """Return how many more cache blocks the files can hold."""
        return sum(owner.room() for owner in self.owners)

    def settle(self) -> None:
        """Replace lost processes, and move full cache blocks of the running texts to files, a run (:class:`KeyLayout`)
        at a time. A run is moved once a text has enough full blocks to fill it. If later blocks are shared by fewer
        texts, they begin a run of their own, and the run before them may stay partly empty. The engine calls this
        between two steps.
        """
        for owner in [*self.owners]:
            if owner.lost:
                for party in self.engine.loans:
                    party.give_up(owner)
        for request in list(self.engine.scheduler.running):
            most, size = self.layout.blocks, self.engine.scheduler.pool.size
            if request.computed // size - lent_blocks(request) < most:
                continue  # it fills no run, whoever shares its blocks
            while own := self.borrower.own_blocks(request)[:most]:
                full = request.computed // size - lent_blocks(request)
                # where fewer texts share what follows, it goes to a run of its own
                if len(own) < most and full < len(own) + most:
                    break
                if not self._move(request, own):
                    break

    def relieve(self) -> bool:
        """Free cache blocks of the engine when none is free. Full blocks of the text that has most of them are moved to
        a file, even if they do not fill a run of the file (:class:`KeyLayout`). Return whether any block was moved.
        """
        longest = self.borrower.longest
        own = self.borrower.own_blocks(longest)[: self.layout.blocks] if longest else []
        return longest is not None and self._move(longest, own)

    def give_up(self, lender: BlockLender) -> None:
        """Start a new process in place of ``lender``, if that is one of these processes. Raises :class:`WeftError` if
        this has happened too often.
        """
        lost = next((owner for owner in self.owners if owner is lender), None)
        if lost is None:
            return
        self._failures[lost.folder] += 1
        why = lost.fate
        if self._failures[lost.folder] >= TRIES:
            raise WeftError(
                f"{why}; that was {TRIES} times; look at the disk, or leave out {CALLED}"
            )
        self._say(
            f"{why}; it is started again, and the texts with keys there are computed again"
        )
        self.owners[self.owners.index(lost)] = self._again(lost)

    def usage(self) -> LoanUsage:
        """Return zeros, because another object, the engine's :class:`weft.generate.lending.Borrower`, counts the blocks
        in these files.
        """
        return LoanUsage()

    def report(self) -> str:
        """Return a line for the user: how much has rested in the files, and how much was read."""
        counts = Counter[str]()
        for owner in self.owners:
            with suppress(LenderLost):
                counts.update(owner.counts())
        sent = sum(owner.sent for owner in self.owners)
        return (
            f"{sent / 1e6:,.0f} MB of keys and values went to files; "
            f"{counts['read'] / 1e6:,.0f} MB were read from disk in {counts['calls']:,} reads, "
            f"{counts['cached'] / 1e6:,.0f} MB from the page cache"
        )

    def close(self) -> None:
        """End all processes that own files."""
        for owner in self.owners:
            owner.close()

    def _move(self, request: Request, table: list[int]) -> bool:
        """Write the blocks ``table`` of ``request``, its next ones, to a file; return whether there was room."""
        if not table:
            return False
        lent = self.borrower.reader.lent
        last = next(
            (lent[block] for block in reversed(request.table) if block < 0), None
        )
        contents = self.borrower.reader.read_blocks(
            table, self.engine.scheduler.pool.size
        )
        for owner in self._preferred(
            last.lender if last else None, last.loan if last else -1
        ):
            try:
                loan = owner.put(
                    contents, last.loan if last and owner is last.lender else None
                )
            except (NoRoom, LenderLost):
                # a lost one is started again between two steps, when no text is in a step
                continue
            self.borrower.hand_over(request, table, owner, loan)
            return True
        return False

    def _preferred(self, before: object, loan: int) -> list[KeyOwner]:
        """The owners, best first: an extent is filled, and the next one goes to the next file."""
        at = next((i for i, owner in enumerate(self.owners) if owner is before), None)
        if at is None:
            return sorted(self.owners, key=lambda owner: -owner.room())
        is_full = self.owners[at].is_last(loan)
        first = (at + is_full) % len(self.owners)
        return [*self.owners[first:], *self.owners[:first]]


def rest_keys(
    engine: Engine, resting: RestingKeys, texts: int, tokens: int, say: Callable[[str], None],
    given: bool = False, start: OwnerStarter | None = None,
) -> KeysAtRest:  # fmt: skip
    """Move keys and values of old tokens of ``engine`` from its cache to files. Return the object that moves them
    between cache and files and that closes the files. Waits until the processes that own the files are ready.

    ``resting``: folders, sizes and demanded speed of the files. ``texts``: number of texts that are written at the same
    time. ``tokens``: largest number of tokens of a text; 0: not known. ``given``: True: the engine's own cache keeps
    its size; False: it becomes just large enough for the newest blocks of ``texts`` texts. ``say``: prints a line.
    ``start``: function that starts a process; None: the process is a new Python interpreter. Raises :class:`UsageError`
    for a model whose keys cannot be moved and for disks that are too slow, and :class:`WeftError` for folders that
    cannot be used.
    """
    reader = check_lending(engine)
    layout = layout_of(engine.block_form(), reader.size)
    budget, scheduler = engine.scheduler.budget, engine.scheduler
    if not given:
        scheduler.pool.blocks = texts * (layout.blocks + 2) + -(-budget // reader.size)
        reader.reserve(scheduler.pool.blocks)
    folders = resting.folders
    if resting.size is None and tokens:
        extents = texts * -(-tokens // (layout.tokens * layout.runs))
        extents = -(-extents // len(folders)) + (len(folders) > 1)
    else:
        size = FILE_GB if resting.size is None else resting.size
        extents = int(size * 1e9) // layout.extent_bytes
    if not extents:
        raise UsageError(
            f"{CALLED}: a file of {resting.size} GB is below one extent of {layout.extent_bytes / 1e9:.2f} GB; "
            f"raise size="
        )
    free = (
        psutil.virtual_memory().available * CACHED_SHARE
        if resting.cached is None
        else resting.cached * 1e9
    )
    cached = min(extents, int(free) // (layout.extent_bytes * len(folders)))

    def owner(folder: Path, measured: bool) -> KeyOwner:
        return KeyOwner(folder, layout, extents, cached, measured, start)

    owners: list[KeyOwner] = []
    try:
        for folder in folders:
            owners.append(owner(folder, bool(resting.rate)))
        if resting.rate and not tokens:
            say(
                f"{CALLED}: rate={resting.rate:g} is not checked, as the model does not say how long its texts are"
            )
        elif resting.rate:
            check_rate(owners, layout, cached, tokens, resting.rate)
    except BaseException:
        for each in owners:
            each.close()
        raise
    for note in dict.fromkeys(each.note for each in owners if each.note):
        say(note)
    return KeysAtRest(engine, owners, lambda lost: owner(lost.folder, False), say)


def hold_adapters(engine: Engine) -> None:
    """Enlarge the cache of ``engine`` by as many blocks as all its adapters need, so that adapters take no blocks from
    texts.
    """
    scheduler = engine.scheduler
    scheduler.pool.blocks += sum(map(len, scheduler.adapter_keys.values()))
    if isinstance(engine.reader, PagedReader):
        engine.reader.reserve(scheduler.pool.blocks)


def check_rate(
    owners: Sequence[KeyOwner], layout: KeyLayout, cached: int, tokens: int, rate: float
) -> None:
    """Raise :class:`UsageError` if the disks of ``owners`` cannot read the keys of a text of ``tokens`` tokens ``rate``
    times a second. ``layout``: layout of the files. ``cached``: number of extents (pieces) of each file that are read
    through the page cache and thus not from the disk.
    """
    direct = max(0, tokens - cached * len(owners) * layout.tokens * layout.runs)
    need = direct * layout.block_bytes // layout.size
    speed = sum(each.rate for each in owners)
    if need and speed < rate * need:
        raise UsageError(
            f"the disk of {', '.join(str(each.folder) for each in owners)} is too slow: it reads "
            f"{speed / 1e9:.2f} GB/s, and each token of a text of {tokens:,} tokens reads {need / 1e6:,.0f} MB: "
            f"{speed / need:.2g} tokens/s, not {rate:g}; take more disks, or raise cached="
        )
