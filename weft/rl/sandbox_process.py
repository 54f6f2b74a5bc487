"""Runs Python code that a model has written, where it can reach nothing: the process of :mod:`weft.rl.code_sandbox`.

It is started by its path and imports nothing of Weft's. Before it takes the first request it gives up what hostile code
could use: it leaves the network (a namespace of its own without any interface), makes every file read-only, hides
folders with sockets and devices, and is no longer root. Each request then runs in a process of its own, which is the
first of its process namespace, has no rights, may start no process and has limits of memory and time. When it ends,
whatever it has started ends.
"""

import ctypes
import importlib
import json
import os
import resource
import secrets
import select
import signal
import sys
import time

#: Kinds of namespaces.
NEWUSER, NEWNET, NEWNS = 0x10000000, 0x40000000, 0x20000
NEWIPC, NEWUTS, NEWPID = 0x08000000, 0x04000000, 0x20000000
#: Number of the system call mount_setattr, which is the same on all processors, and its arguments.
MOUNT_SETATTR, AT_FDCWD, RECURSIVE, READ_ONLY, PRIVATE = 442, -100, 0x8000, 1, 1 << 18
#: Options of prctl.
DEATH_SIGNAL, NO_NEW_RIGHTS = 1, 38
#: Version of the header of capset.
CAPSET = 0x20080522
#: Folders that are empty for the code: sockets of services lie there, devices, and what is known of other processes.
HIDDEN = ("/proc", "/sys", "/dev", "/run", "/var/run", "/tmp", "/var/tmp", "/dev/shm")
#: User without rights that a process of root becomes.
NOBODY = 65534
#: What answers import; loaded before files may become unreadable.
MODULES = (
    "abc", "array", "bisect", "calendar", "cmath", "collections", "collections.abc", "contextlib", "copy",
    "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "heapq", "itertools", "json", "math",
    "numbers", "operator", "random", "re", "statistics", "string", "textwrap", "types", "typing", "unicodedata",
)  # fmt: skip
#: Characters of an answer's result that are read.
LONGEST = 1 << 16

libc = ctypes.CDLL(None, use_errno=True)


class _Attributes(ctypes.Structure):
    """Argument of mount_setattr."""

    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns", ctypes.c_uint64),
    )


def _check(result: int, what: str) -> None:
    """Raise :class:`OSError`, which names the system call, if its result says that it failed."""
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _leave_everything() -> None:
    """Give up the network, the right to write, and root's rights. Raises :class:`OSError` where this is not allowed."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _check(libc.unshare(NEWUSER | NEWNET | NEWNS | NEWIPC | NEWUTS), "unshare")
    everything = _Attributes(0, 0, PRIVATE, 0)
    size = ctypes.sizeof(everything)
    _check(
        libc.syscall(
            MOUNT_SETATTR, AT_FDCWD, b"/", RECURSIVE, ctypes.byref(everything), size
        ),
        "mount_setattr",
    )
    for folder in HIDDEN:
        if os.path.isdir(folder) and not os.path.islink(folder):
            _check(libc.mount(b"none", folder.encode(), b"tmpfs", 0, b"size=4k"), "mount")  # fmt: skip
    everything = _Attributes(READ_ONLY, 0, 0, 0)
    _check(
        libc.syscall(
            MOUNT_SETATTR, AT_FDCWD, b"/", RECURSIVE, ctypes.byref(everything), size
        ),
        "mount_setattr",
    )


def _give_up_rights() -> None:
    """Give up the rights over the own namespaces, so that what is read-only or hidden remains so."""
    header, nothing = (ctypes.c_uint32 * 2)(CAPSET, 0), (ctypes.c_uint32 * 6)()
    _check(libc.prctl(NO_NEW_RIGHTS, 1, 0, 0, 0), "prctl")
    _check(libc.capset(header, nothing), "capset")


def _limit(space: int, seconds: float) -> None:
    """Limit the memory of this process to ``space`` bytes, and what else it may use."""
    for what, most in (
        (resource.RLIMIT_AS, space),
        (resource.RLIMIT_CPU, int(seconds) + 2),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(what, (most, most))


def _judge(request: dict[str, object]) -> list[bool]:
    """Run the code of a request, then each of its tests, and return which of them pass."""
    names: dict[str, object] = {"__name__": "answer"}
    tests = request["tests"]
    assert isinstance(tests, list)
    try:
        exec(compile(str(request["code"]), "answer", "exec"), names)
        exec(compile(str(request["setup"]), "setup", "exec"), names)
    except BaseException:
        return [False] * len(tests)
    passed = []
    for test in tests:
        try:
            exec(compile(test, "test", "exec"), names)
            passed.append(True)
        except BaseException:
            passed.append(False)
    return passed


def _run_alone(request: dict[str, object], writing: int, null: int, space: int, word: str) -> None:  # fmt: skip
    """Judge a request in this process, the first of its namespace, and end it. ``word`` begins the result."""
    try:
        libc.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.dup2(writing, 3)
        os.closerange(4, 4096)
        os.setsid()
        signal.alarm(0)
        _give_up_rights()
        _limit(space, float(str(request["seconds"])))
        passed = _judge(request)
        os.write(3, (word + json.dumps(passed)).encode())
    finally:
        os._exit(0)


def _guard(request: dict[str, object], reply: int, null: int, space: int) -> None:
    """Run a request in a new process, for at most its seconds, and write the result to the pipe ``reply``."""
    libc.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    word = secrets.token_hex(16)
    reading, writing = os.pipe()
    _check(libc.unshare(NEWPID), "unshare")
    child = os.fork()
    if child == 0:
        os.close(reading)
        _run_alone(request, writing, null, space, word)
    os.close(writing)
    result, end = b"", time.monotonic() + float(str(request["seconds"]))
    while len(result) <= LONGEST:
        left = end - time.monotonic()
        if left <= 0 or not select.select([reading], [], [], left)[0]:
            break
        part = os.read(reading, LONGEST)
        if not part:
            break
        result += part
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if result.startswith(word.encode()):
        os.write(reply, result[len(word) :])
    os._exit(0)


def _answer(line: str, null: int, base: int) -> str:
    """Run the request of a line, and return the reply: a list of which tests pass, or null if the code did not end."""
    request = json.loads(line)
    reading, writing = os.pipe()
    guardian = os.fork()
    if guardian == 0:
        os.close(reading)
        try:
            _guard(request, writing, null, base + (int(request["megabytes"]) << 20))
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(guardian, 0)
    return said or "null"


def _main() -> None:
    """Take requests as lines of JSON, and write a line for each, until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    with open("/proc/self/statm") as pages:
        base = int(pages.read().split()[0]) * resource.getpagesize()
    try:
        for module in (*MODULES, *sys.argv[1:]):
            importlib.import_module(module)
        _leave_everything()
        replies.write('{"ready": true}\n')
    except (OSError, ImportError) as error:
        replies.write(json.dumps({"error": str(error)}) + "\n")
        return
    finally:
        replies.flush()
    for line in sys.stdin:
        replies.write(_answer(line, null, base) + "\n")
        replies.flush()


if __name__ == "__main__":
    _main()
