"""``weft serve``: a model over HTTP, as OpenAI's clients ask for it."""

import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from weft.cli.arguments import SecretFile, read_address, read_keys, set_secret
from weft.cli.console import warn
from weft.cli.engine_options import holding_engine
from weft.cli.front_door import FrontDoor
from weft.cli.serve_pictures import check_heeded, makes_pictures, serve_pictures
from weft.errors import UsageError
from weft.net.sockets import Socket, own_address

if TYPE_CHECKING:
    import uvicorn

    from weft.cluster.cluster_settings import ClusterSettings
    from weft.cluster.engine_router import EngineRouter
    from weft.cluster.role_counts import RoleChooser
    from weft.generate.backend import Backend
    from weft.generate.open_engine import EngineOptions
    from weft.serve.service import Service

#: Addresses that stand for all of this host's, and an address outside of every private network (RFC 5737).
EVERYWHERE, OUTSIDE = ("0.0.0.0", "::"), "192.0.2.1"

#: What --tokens and --model-wait are if they are left out.
MOST_TOKENS, MODEL_WAIT = 1024, 30.0

_hosts = (
    "A name by which clients reach this server, or *.example.com, or *; may be repeated. If not set: on 127.0.0.1 "
    "only names of this machine such as localhost are accepted, elsewhere every name."
)
_context = (
    "Largest number of tokens in a prompt and its answer together; 0: the limit in the model's config.json, if it "
    "has one."
)
_cors = (
    "An origin such as https://a.example whose pages may send requests, or *; may be repeated. If not set: "
    "none."
)
_connections = "Largest number of connections at a time; the connection that is idle longest makes way for a new one."
_resident = (
    "Of the models of --models, have only N in memory beside the base, or as many as fit into BYTES with it, such as "
    "8GB; others are read when they are asked for. If not set: all."
)
_model_wait = (
    "Seconds within which a request to a model that is not in memory should "
    "begin; more let each model serve more requests before another takes its "
    "place."
)
_router = (
    "A TOML file, or a model that embeds texts: chooses the model of requests "
    "that name the model auto."
)
_keys = (
    "A file with one API key per line; requests without a key are refused. "
    "Cached prefixes are shared only among requests with the same key."
)
_template = (
    "A Jinja file with the chat template, instead of the model's own. Tools "
    "need a template that shows them to the model."
)

_engines = "Start this many engines on this host, each in its own process; a router spreads the requests over them."
_cluster = "A file with a section cluster: engines here and on other hosts, which join by weft engine --join."
_dispatch = (
    "With --engines: which engine a request goes to. load: the one with most free memory per request; "
    "cached-prefix: the one that has most of its prompt; session: always the same for a user or conversation; "
    "balanced: a fast one with little to do."
)


@holding_engine
def serve_command(
    options: "EngineOptions",
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 for all networks.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="The port to listen on; 0: any free port."),
    ] = 8000,
    api_key: Annotated[Path | None, typer.Option(metavar="FILE", help=_keys)] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="The model's name for clients; by default the model's own name."
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="Largest number of tokens in an answer, if a request sets no limit.",
        ),
    ] = MOST_TOKENS,
    drain: Annotated[
        int, typer.Option(min=0, help="Seconds for answers to finish after Ctrl-C.")
    ] = 30,
    resident: Annotated[str, typer.Option(metavar="N|BYTES", help=_resident)] = "",
    model_wait: Annotated[float, typer.Option(min=0, help=_model_wait)] = MODEL_WAIT,
    router: Annotated[
        Path | None, typer.Option(metavar="FILE|MODEL", help=_router)
    ] = None,
    max_model_len: Annotated[int, typer.Option(min=0, help=_context)] = 0,
    chat_template: Annotated[str, typer.Option(metavar="FILE", help=_template)] = "",
    allowed_hosts: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=_hosts)
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help=_cors)
    ] = None,
    connections: Annotated[int, typer.Option(min=1, help=_connections)] = 2048,
    engines: Annotated[int, typer.Option(min=0, metavar="N", help=_engines)] = 0,
    cluster: Annotated[Path | None, typer.Option(metavar="FILE", help=_cluster)] = None,
    dispatch: Annotated[str, typer.Option(metavar="NAME", help=_dispatch)] = "load",
    secret: SecretFile = None,
) -> int:
    """Serve a trained model over HTTP as OpenAI's clients ask for it, with metrics and a chat page.

    A model of images answers at /v1/images/generations.
    """
    import torch

    from weft.checkpoint.model import open_model, tokenizer_of
    from weft.checkpoint.model_family import model_folders
    from weft.data.chat.chat_template import template_text
    from weft.generate.many_models import Room
    from weft.generate.open_engine import open_engine
    from weft.generate.start import as_rank, launch_ranks, leads
    from weft.shapes.carried_files import context_length

    try:
        from weft.serve.front import Front
        from weft.serve.model_choice import (
            ModelChoice,
            backend_embedder,
            model_embedder,
            read_choice_settings,
        )
        from weft.serve.resident_models import resident_models
        from weft.serve.server import Server
        from weft.serve.service import Service
    except ImportError as error:
        raise UsageError(
            f"serving needs the package {error.name}: pip install 'weft[serve]'"
        ) from None
    keys = read_keys(api_key) if api_key else []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if resident:
        options = replace(options, resident=resident)
        options.check()
    if dispatch != "load" and (cluster or not engines):
        raise UsageError(
            "--dispatch is for --engines; leave it out"
            + (", and set policy in the file of --cluster" if cluster else "")
        )
    if resident and (engines or cluster):
        raise UsageError(
            "--resident is for one engine; leave out --engines and --cluster"
        )
    if options.lend and not (engines or cluster):
        raise UsageError(
            "--lend is between engines; give --engines N or --cluster FILE"
        )
    choice = (
        read_choice_settings(
            router, model_folders(options.models, warn) if options.models else ()
        )
        if router
        else None
    )
    template = chat_template and template_text(chat_template, "--chat-template")
    # mistakes are said before anything is read
    hosts, origins = allowed_hosts or (), cors or ()
    door = FrontDoor(host, port, keys, hosts, origins, drain, connections)
    door.check()
    checkpoint = options.checkpoint
    name = name or checkpoint.rstrip("/").split("/")[-1]
    if makes_pictures(checkpoint):
        of_texts = {
            "--tokens": tokens != MOST_TOKENS, "--resident": resident, "--model-wait": model_wait != MODEL_WAIT,
            "--router": router, "--max-model-len": max_model_len, "--chat-template": chat_template,
            "--engines": engines, "--cluster": cluster, "--secret": secret,
        }  # fmt: skip
        check_heeded(options, of_texts)
        return serve_pictures(options, name, door)

    def front_for(
        backend: "Backend",
        files: dict[str, bytes],
        adapted: list[str],
        listening: Socket,
        about: str,
    ) -> Front:
        """Build the HTTP server in front of ``backend``, and say where it is. ``about``: what is said of the cache."""
        tokenizer = tokenizer_of(files, checkpoint, warn)
        if template:
            tokenizer = replace(tokenizer, chat_template=template, named_templates={})
        context = max_model_len or context_length(files)
        server = Server(backend, tokenizer, name, keys, tokens, adapted, context)
        if choice:
            embedded = backend_embedder(backend, tokenizer)
            if choice.embedding:
                model, files, _ = open_model(choice.embedding, device, warn)
                embedded = model_embedder(model, tokenizer_of(files, choice.embedding))
            server.choice = ModelChoice(choice, name, adapted, embedded)
        return door.front(server, listening, about)

    if engines or cluster:
        options.check_moves()
        settings = _settings(engines, cluster, dispatch, secret)
        listening = door.listening()
        with _routed(settings, options, name) as routed:
            front = front_for(
                routed.router, routed.files, routed.adapters, listening, routed.about
            )
            with suppress(KeyboardInterrupt):
                front.run(sockets=[listening])
        return 0
    if (code := launch_ranks(options.spread, checkpoint)) is not None:
        return code
    with as_rank(options.spread, device) as device:
        opened_socket = door.listening() if leads() else None
        opened = open_engine(options, device, name, warn)
        if opened is None or opened_socket is None:
            return 0
        service = Service(opened.engine, options.most)
        if opened.family and opened.resting:
            service.resident = resident_models(
                service.thread,
                opened.family,
                opened.resting,
                Room.parse(resident),
                model_wait,
                options.waiting,
            )
        about = f"a cache of {opened.cache:,} tokens"
        if service.facts.scores:
            about = "POST /v1/score, as it is a reward model"
        front = front_for(service, opened.files, opened.others, opened_socket, about)
        if options.spread.world > 1:
            threading.Thread(
                target=_end_with, args=(service, front), daemon=True
            ).start()
        with suppress(KeyboardInterrupt):  # which comes again after the last answer
            front.run(sockets=[opened_socket])
        service.close()
        if service.failure is not None and options.spread.world > 1:
            raise service.failure
        opened.engine.close()
    return 0


def _settings(
    engines: int, cluster: Path | None, dispatch: str, secret: Path | None
) -> "ClusterSettings":
    """Return the settings of the cluster, and see to its secret: that of the user, or one for this session."""
    from weft.cluster.cluster_settings import ClusterSettings, read_cluster
    from weft.cluster.dispatch_policy import dispatch_policy

    if cluster is not None:
        if engines:
            raise UsageError(
                "--engines and --cluster are two ways to say the same; set engines in the file, and leave out --engines"
            )
        settings = read_cluster(cluster)
        settings.parts()  # mistakes are said before anything is read
        read_address(settings.listen, "cluster.listen")
        dispatch_policy(settings.policy, "cluster.policy")
    else:
        settings = ClusterSettings(engines=engines, policy=dispatch)
        dispatch_policy(dispatch)
    if cluster is None and secret is None and not os.environ.get("WEFT_SECRET"):
        os.environ["WEFT_SECRET"] = secrets.token_hex(32)
    set_secret(secret, "--cluster")
    return settings


class _Routed(NamedTuple):
    """A router with its engines. ``files``: those beside the model's weights; ``adapters``: names of the adapters;
    ``about``: what is said of engines and cache.
    """

    router: "EngineRouter"
    files: dict[str, bytes]
    adapters: list[str]
    about: str


@contextmanager
def _routed(
    settings: "ClusterSettings", options: "EngineOptions", name: str
) -> Iterator[_Routed]:
    """Run a router and the engines that it starts itself, which end with the context."""
    from weft.cluster.dispatch_policy import dispatch_policy
    from weft.cluster.engine_processes import EngineProcesses, visible_gpus
    from weft.cluster.engine_router import EngineRouter
    from weft.cluster.other_router import router_endpoint, router_name
    from weft.cluster.router_model import RouterModel
    from weft.generate.fingerprint import open_for_reading, weights_fingerprint
    from weft.generate.open_engine import SHARE, adapter_digests, model_digests
    from weft.net.endpoint import process_endpoint

    model = open_for_reading(options.checkpoint, options.ema)
    digests = adapter_digests(options.adapters, name) | model_digests(options.models)
    listen = read_address(settings.listen, "cluster.listen")
    endpoint = router_endpoint(lambda: process_endpoint(*listen), listen, "")
    host, port = endpoint.address
    if host in EVERYWHERE and not (outside := own_address(OUTSIDE)).startswith("127."):
        host = outside  # by which other hosts reach this one
    address = f"{host}:{port}"
    processes = None
    if settings.engines:
        roles = settings.parts()
        # cache engines keep the files for all
        own = replace(options, cache_folder=None, cache_folder_size=None) if "cache" in roles else options  # fmt: skip
        named = f"--model-name={name}"
        words = {"": [*own.words(), named], "cache": [*options.words("cache"), named]}
        ranks, gpus = options.spread.world, visible_gpus()
        processes = EngineProcesses(roles, address, words, SHARE, warn, ranks, gpus)
    router = None
    try:
        expected = RouterModel(
            weights_fingerprint(model, options.numerics),
            model.shape.vocab,
            model.shape.embed,
            digests,
            model.shape.output == "score",
        )
        policy = dispatch_policy(settings.policy)
        limits = settings.limits
        router = EngineRouter(
            endpoint,
            "",
            expected,
            warn,
            policy,
            limits.patience,
            limits.headroom,
            limits.balance,
            router_name(name),
            roles=_role_watch(settings),
        )
        about = f"engines that join at {address}"
        if processes is not None:
            processes.await_joined(lambda: len(router.links))
            cache = sum(link.about.cache for link in router.links.values())
            about = f"{settings.engines} engines and {cache:,} tokens in their caches"
            if settings.roles.cache:
                about += f", {settings.roles.cache} of them for cache blocks alone"
        yield _Routed(router, dict(model.files), [*digests], about)
    finally:
        if router is not None:
            router.close()
        if processes is not None:
            # not `links`: engines whose connections have ended already may still write files
            processes.close(router.let_go if router is not None else ())
        endpoint.close()


def _role_watch(settings: "ClusterSettings") -> "RoleChooser | None":
    """Return what chooses the engines' roles anew, or None if they stay as they are."""
    from weft.serve.placement_search import ServiceLimits
    from weft.serve.role_watch import RoleWatch

    roles = settings.roles
    if roles.ttft is None or roles.tpot is None:
        return None
    return RoleWatch(ServiceLimits(roles.ttft, roles.tpot))


def _end_with(service: "Service", front: "uvicorn.Server") -> None:
    """End the server when its engine cannot go on, so that the other ranks end too and are named."""
    while service.failure is None:
        time.sleep(0.2)
    front.should_exit = True
