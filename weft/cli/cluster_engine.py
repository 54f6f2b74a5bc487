"""``weft engine``: an engine in a process of its own, which works for a router on this host or another."""

import os
import platform
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import uuid4

import typer

from weft.cli.arguments import SecretFile, read_address, set_secret
from weft.cli.console import warn
from weft.cli.engine_options import holding_engine
from weft.errors import UsageError

if TYPE_CHECKING:
    from weft.generate.open_engine import EngineOptions

#: Seconds that the ranks of an engine get to end once its answers have.
LEAVE_S = 30.0

_join = "The address of the router: the one that weft serve --cluster has printed."
_name = "The engine's name for the router and in metrics; by default host and process."
_role = (
    "prefill: compute prompts, and let other engines go on after the first token; decode: go on with answers that "
    "others have begun; left out: both."
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
    role: Annotated[str, typer.Option(metavar="prefill|decode", help=_role)] = "",
    secret: SecretFile = None,
    redial: Annotated[float, typer.Option(min=0, help=_redial)] = 60,
    drain: Annotated[float, typer.Option(min=0, help=_drain)] = 30,
    share: Annotated[float, typer.Option(min=0.01, max=0.95, help=_share)] = 0.4,
    model_name: Annotated[str, typer.Option(help=_model_name)] = "",
    joined_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help=_joined_file)
    ] = None,
) -> int:
    """Run an engine that answers the requests of a router (weft serve --cluster FILE), until the router lets it go."""
    import torch

    from weft.checkpoint.model import tokenizer_of
    from weft.cluster.cluster_messages import ROLES, EngineAbout
    from weft.cluster.engine_loans import EngineLoans
    from weft.cluster.engine_member import EngineMember, unreached
    from weft.generate.fingerprint import open_for_reading, weights_fingerprint
    from weft.generate.grammar import Grammars
    from weft.generate.open_engine import adapter_digests, model_digests, open_engine
    from weft.generate.outside_cache import join_memories
    from weft.generate.start import as_engine, launch_ranks
    from weft.net.endpoint import process_endpoint
    from weft.net.sockets import await_host, own_address
    from weft.version import VERSION

    if role and role not in ROLES:
        raise UsageError(f"--role {role} is not possible; give {' or '.join(ROLES)}")
    router = read_address(join, "--join")
    if joined_file is not None:
        _mark(joined_file, False)
    set_secret(secret, "weft engine")
    checkpoint = options.checkpoint
    if (code := launch_ranks(options.spread, checkpoint, drain + LEAVE_S)) is not None:
        return code
    called = model_name or checkpoint.rstrip("/").split("/")[-1]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with as_engine(options.spread, device) as device:
        # before the ranks of this engine meet, as others than they must reach it too
        try:
            await_host(router[0], redial)
        except OSError as error:
            raise unreached(join, error) from None
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
            name=name or f"{platform.node()}-{os.getpid()}",
            instance=uuid4().hex,
            version=VERSION,
            fingerprint=weights_fingerprint(model, options.weights),
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
        )

        def grammars() -> Grammars:
            return Grammars(tokenizer_of(files, checkpoint), about.vocab)

        def note_joined(joined: bool) -> None:
            if joined_file is not None:
                _mark(joined_file, joined)

        member = EngineMember(
            engine, about, warn, grammars, loans, memories, note_joined
        )

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
            engine.close()  # over the endpoint, if it has ranks
            endpoint.close()
        warn(f"engine {about.name} ends")
    return 0


def _mark(file: Path, joined: bool) -> None:
    """Make ``file`` exist or not. Raises :class:`UsageError` if that is not possible."""
    try:
        file.touch() if joined else file.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"--joined-file {file} cannot be written: {error.strerror}; name another file"
        ) from None
