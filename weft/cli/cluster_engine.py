"""``weft engine``: an engine in a process of its own, which works for a router on this host or another."""

import inspect
import os
import platform
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import uuid4

import typer

from weft.cli.arguments import SecretFile, read_address, set_secret
from weft.cli.console import warn
from weft.cli.engine_options import holding_engine, read_engine_options
from weft.errors import UsageError, nearest, why_unwritten

if TYPE_CHECKING:
    from weft.cluster.cache_member import CacheMember
    from weft.cluster.cluster_messages import EngineAbout
    from weft.cluster.engine_member import EngineMember
    from weft.generate.cache_role import CacheStock
    from weft.generate.open_engine import EngineOptions
    from weft.net.endpoint import Address, Endpoint

#: The model's name for an engine that writes rollouts with the weights of a training run.
POLICY = "policy:"
#: Options that an engine reads which writes rollouts.
OF_POLICY = "checkpoint", "cache"
#: Seconds that the ranks of an engine get to end once its answers have.
LEAVE_S = 30.0
#: What --drain and --share are if they are not given.
DRAIN_S, SHARE = 30, 0.4

_join = (
    "The address of the router: the one that weft serve --cluster has printed, or with --checkpoint policy: "
    "the one that a training run has printed."
)
_name = "The engine's name for the router and in metrics; by default host and process."
_role = (
    "prefill: compute prompts, and let other engines go on after the first token; decode: go on with answers that "
    "others have begun; cache: compute nothing, and keep cache blocks for all engines, in as many GB as --host-cache "
    "says or in --share of the free memory, and in --cache-folder. If not given: prefill and decode."
)
_redial = (
    "Seconds for which the engine tries to join again when its router is "
    "gone; its cache is kept meanwhile."
)
_drain = (
    "Seconds for answers to finish after SIGTERM or Ctrl-C, before other "
    "engines go on with them."
)
_share = "Part of the free memory for the cache, if --cache gives no tokens."
_joined_file = (
    "A file that exists while the engine has joined a router: for readiness probes."
)
_model_name = (
    "The model's name for clients, which no adapter may have; by default the "
    "model's own name."
)


@holding_engine
def engine_command(
    options: "EngineOptions",
    join: Annotated[str, typer.Option(metavar="HOST:PORT", help=_join)],
    name: Annotated[str, typer.Option(help=_name)] = "",
    role: Annotated[str, typer.Option(metavar="prefill|decode|cache", help=_role)] = "",
    secret: SecretFile = None,
    redial: Annotated[float, typer.Option(min=0, help=_redial)] = 60,
    drain: Annotated[float, typer.Option(min=0, help=_drain)] = DRAIN_S,
    share: Annotated[float, typer.Option(min=0.01, max=0.95, help=_share)] = SHARE,
    model_name: Annotated[str, typer.Option(help=_model_name)] = "",
    joined_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help=_joined_file)
    ] = None,
) -> int:
    """Run an engine that answers the requests of a router (weft serve --cluster FILE), until the router lets it go.

    With --checkpoint policy: it writes rollouts for a training run with roles.rollout, which sends it the weights.
    """
    import torch

    from weft.checkpoint.model import tokenizer_of
    from weft.cluster.cache_member import CacheMember
    from weft.cluster.cluster_messages import ROLES, EngineAbout
    from weft.cluster.engine_loans import EngineLoans
    from weft.cluster.engine_member import EngineMember
    from weft.generate.fingerprint import open_for_reading, weights_fingerprint
    from weft.generate.grammar import Grammars
    from weft.generate.open_engine import (
        OF_CACHE,
        adapter_digests,
        model_digests,
        open_engine,
    )
    from weft.generate.outside_cache import join_memories
    from weft.generate.start import as_engine, launch_ranks
    from weft.net.endpoint import process_endpoint
    from weft.net.sockets import own_address
    from weft.version import VERSION

    if role and role not in ROLES:
        raise UsageError(f"--role {role} is not possible; {nearest(role, ROLES, True)}")
    if role == "cache":
        _check_options(
            options, OF_CACHE, "--role cache keeps blocks and computes nothing"
        )
    if options.checkpoint == POLICY:
        why = f"--checkpoint {POLICY} writes rollouts as the training run says"
        _check_options(options, OF_POLICY, why)
        own = {
            "--role": role, "--model-name": model_name, "--joined-file": joined_file, "--plugin": options.plugins,
            "--drain": drain != DRAIN_S, "--share": share != SHARE,
        }  # fmt: skip
        for option, given in own.items():
            if given:
                raise UsageError(f"{why}; leave out {option}")
    options.check_moves()
    router = read_address(join, "--join")
    if joined_file is not None:
        _clear_mark(joined_file)
    checkpoint = options.checkpoint
    if checkpoint == POLICY:
        return _write_rollouts(options, router, name, secret, redial)
    set_secret(secret, "weft engine")
    name = name or f"{platform.node()}-{os.getpid()}"

    def note_joined(joined: bool) -> None:
        if joined_file is not None:
            _mark(joined_file, joined)

    if role == "cache":
        stock, about = _open_cache(options, name, share)
        _await_router(router, join, redial)
        endpoint = process_endpoint(own_address(router[0]))
        keeper = CacheMember(stock, about, warn, note_joined)
        _work_until_let_go(keeper, endpoint, router, redial, drain, endpoint.close)
        return 0
    if (code := launch_ranks(options.spread, checkpoint, drain + LEAVE_S)) is not None:
        return code
    called = model_name or checkpoint.rstrip("/").split("/")[-1]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with as_engine(options.spread, device) as device:
        # before the ranks of this engine meet, as others than they must reach it too
        _await_router(router, join, redial)
        endpoint = process_endpoint(own_address(router[0]))
        opened = open_engine(options, device, called, warn, share)
        if opened is None:
            return 0
        engine, files = opened.engine, opened.files
        model = open_for_reading(checkpoint, options.ema)
        loans = EngineLoans(engine, endpoint, "") if options.lend else None
        kept = opened.kept
        memories = join_memories(kept, endpoint, "") if kept else None
        about = EngineAbout(
            name=name,
            instance=uuid4().hex,
            version=VERSION,
            fingerprint=weights_fingerprint(model, options.numerics),
            vocab=engine.model.shape.vocab,
            embed=engine.model.shape.embed,
            cache=opened.cache // engine.reader.size * engine.reader.size,
            block=engine.reader.size,
            most=options.most,
            searches=options.spread.world == 1 and engine.drafter is None,
            adapters=adapter_digests(options.adapters, called)
            | model_digests(options.models),
            loans=endpoint.address if options.lend else (),
            memory=endpoint.address if memories else (),
            role=role,
            rows=engine.scheduler.limit,
        )

        def grammars() -> Grammars:
            return Grammars(tokenizer_of(files, checkpoint), about.vocab)

        keeps = f"{about.fingerprint} {options.invariant}"
        member = EngineMember(
            engine, about, warn, grammars, loans, memories, note_joined, keeps
        )

        def close() -> None:
            engine.close()  # over the endpoint, if it has ranks
            endpoint.close()

        _work_until_let_go(member, endpoint, router, redial, drain, close)
    return 0


def _await_router(router: "Address", join: str, redial: float) -> None:
    """Wait until this host can reach that of ``router``, for ``redial`` seconds. Raises :class:`WeftError` after them.
    ``join``: the address as the user gave it.
    """
    from weft.cluster.joining import unreached
    from weft.net.sockets import await_host

    try:
        await_host(router[0], redial)
    except OSError as error:
        raise unreached(join, error) from None


def _work_until_let_go(
    member: "EngineMember | CacheMember", endpoint: "Endpoint", router: "Address", redial: float, drain: float,
    close: Callable[[], None],
) -> None:  # fmt: skip
    """Let ``member`` work for ``router`` until the router or a signal ends it, then call ``close``. ``drain``: seconds
    that answers get to end after the first signal.
    """

    def ask_to_end(number: int, frame: object) -> None:
        """Drain at the first signal, and leave at once at a second one."""
        if member.draining:
            member.drain(move=True)
        else:
            member.drain()
            timer.start()

    timer = threading.Timer(drain, member.drain, (True,))
    timer.daemon = True
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask_to_end)
    try:
        member.run(endpoint, router, "", redial)
    finally:
        timer.cancel()
        member.close()
        close()
    warn(f"engine {member.about.name} ends")


def _check_options(options: "EngineOptions", read: tuple[str, ...], why: str) -> None:
    """Raise :class:`UsageError` for an option that was given and is not one of ``read``. ``why``: what the line says
    before it names the option.
    """
    usual = inspect.signature(read_engine_options).parameters
    for name, parameter in usual.items():
        if name in (*read, "plugin"):
            continue
        if getattr(options, name) not in (parameter.default, "", None):
            raise UsageError(f"{why}; leave out --{name.replace('_', '-')}")


def _open_cache(
    options: "EngineOptions", name: str, share: float
) -> "tuple[CacheStock, EngineAbout]":
    """Return the blocks of a cache engine, and what a router learns of it. ``name``: the engine's name. ``share``: part
    of the free memory for blocks, if ``options`` do not give its GB.

    Raises :class:`UsageError` if the memory holds not a single block.
    """
    import psutil

    from weft.cluster.cluster_messages import EngineAbout
    from weft.generate.cache_role import open_stock
    from weft.generate.engine import BLOCK
    from weft.generate.fingerprint import open_for_reading, weights_fingerprint
    from weft.generate.open_engine import FOLDER_GB
    from weft.shapes.shape import shape_of
    from weft.version import VERSION

    model = open_for_reading(options.checkpoint, options.ema)
    fingerprint = weights_fingerprint(model, options.numerics)
    free = share * psutil.virtual_memory().available
    memory = int(options.host_cache * 1e9 or free)
    block = BLOCK * int(shape_of(model.shape).cache_bytes)
    if memory < block:
        raise UsageError(
            f"a cache block of {options.checkpoint} has at least {block:,} bytes, more than the {memory:,} bytes for "
            f"them; give --host-cache {1.1 * block / 1e9:.2g} or more"
        )
    size = options.cache_folder_size
    most = int((FOLDER_GB if size is None else size) * 1e9)
    stock = open_stock(memory, options.cache_folder, fingerprint, most, warn)
    about = EngineAbout(
        name=name,
        instance=uuid4().hex,
        version=VERSION,
        fingerprint=fingerprint,
        vocab=model.shape.vocab,
        embed=model.shape.embed,
        cache=0,
        block=1,
        most=0,
        searches=False,
        adapters={},
        role="cache",
    )
    return stock, about


def _write_rollouts(
    options: "EngineOptions",
    run: tuple[str, int],
    name: str,
    secret: Path | None,
    redial: float,
) -> int:
    """Run an engine that writes rollouts for the training run at the address ``run``, until the run lets it go."""
    import torch

    from weft.net.endpoint import process_endpoint
    from weft.net.sockets import own_address
    from weft.rl.rollout_engine import SECRET, run_rollout_engine

    own = os.environ.get(SECRET, "")  # of a run that has started this engine
    if not own:
        set_secret(secret, "weft engine")
    called = name or f"{platform.node()}-{os.getpid()}"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    endpoint = process_endpoint(own_address(run[0]))
    try:
        run_rollout_engine(
            endpoint, run, own, called, warn, redial, options.cache, device
        )
    finally:
        endpoint.close()
    warn(f"engine {called} ends")
    return 0


def _clear_mark(file: Path) -> None:
    """Remove the mark that a former engine may have left at ``file``, and check that one can be there later.

    It never creates ``file``, as a probe would take this for a joined engine. Raises :class:`WeftError` if its folder
    is missing or cannot be written, and :class:`UsageError` if something else than a mark is at ``file``.
    """
    from weft.writable import check_writable

    if os.path.isdir(file) or (os.path.isfile(file) and os.path.getsize(file)):
        raise UsageError(
            f"--joined-file {file} is a folder or has content, and the mark of an engine is an empty file; name "
            "another file"
        )
    if not os.path.isdir(file.parent):
        raise UsageError(
            f"--joined-file {file} cannot be written: there is no folder {file.parent}; make it, or name another file"
        )
    check_writable(file.parent, "--joined-file in", folder=True)
    _mark(file, False)


def _mark(file: Path, joined: bool) -> None:
    """Make ``file`` exist or not. Raises :class:`UsageError` if that is not possible."""
    try:
        file.touch() if joined else file.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"--joined-file {file} cannot be written: {why_unwritten(error, 'name another file')}"
        ) from None
