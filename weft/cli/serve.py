"""``weft serve``: a model over HTTP, as OpenAI's clients ask for it."""

import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.arguments import (
    Ahead,
    Draft,
    EarlyLayer,
    Ema,
    ModelName,
    PluginModules,
    Spread,
    Weights,
    import_plugins,
    read_keys,
)
from weft.cli.console import warn
from weft.errors import UsageError
from weft.net.sockets import Socket, listen

if TYPE_CHECKING:
    import uvicorn

    from weft.serve.service import Service

_hosts = (
    "A name by which clients reach this server, or *.example.com, or *; may "
    "be repeated. Left out: on 127.0.0.1 only names of this machine such as "
    "localhost are accepted, elsewhere every name."
)
_context = (
    "Most tokens of a prompt and its answer together; 0: the limit in the "
    "model's config.json, if it has one."
)
_cors = (
    "An origin such as https://chat.example.com whose pages may send "
    "requests, or *; may be repeated. Left out: none."
)
_connections = (
    "Most connections at a time; the connection that is idle longest makes "
    "way for a new one."
)
_adapters = (
    "A folder of adapters in PEFT's format; each is served as a model with "
    "its folder's name."
)
_models = (
    "A folder of models of the same shape and tokenizer, such as fine-tunes; "
    "each is served by its folder's name. Weights that are equal are in "
    "memory once."
)
_keys = (
    "A file with one API key per line; requests without a key are refused. "
    "Cached prefixes are shared only among requests with the same key."
)
_template = (
    "A Jinja file with the chat template, instead of the model's own. Tools "
    "need a template that shows them to the model."
)
_policy = (
    "Which tokens a step computes first. exact-fill: new tokens, then "
    "prompts, cut where the budget ends; chunked:N: new tokens and at most N "
    "of one prompt; prompts-first: prompts, then new tokens; urgency: the "
    "requests whose workflow has least time left."
)
_invariant = (
    "Make log-probabilities independent of other requests, to the last bit; slower."
)

#: The share of the free memory that the cache may fill.
SHARE = 0.4


def serve_command(
    checkpoint: Annotated[str, ModelName],
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
    requests: Annotated[
        int, typer.Option(min=1, help="Most answers that are written at the same time.")
    ] = 64,
    waiting: Annotated[
        int,
        typer.Option(
            min=0,
            help="Most answers that may wait; further requests are refused with 429.",
        ),
    ] = 960,
    budget: Annotated[
        int,
        typer.Option(
            min=1, help="Most tokens per step; longer prompts are read in pieces."
        ),
    ] = 512,
    policy: Annotated[
        str,
        typer.Option(
            metavar="exact-fill|chunked:N|prompts-first|urgency", help=_policy
        ),
    ] = "exact-fill",
    cache: Annotated[
        int, typer.Option(min=0, help="Tokens in the cache; 0: by the free memory.")
    ] = 0,
    tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Most tokens of an answer, if a request sets no limit."
        ),
    ] = 1024,
    drain: Annotated[
        int, typer.Option(min=0, help="Seconds for answers to finish after Ctrl-C.")
    ] = 30,
    adapters: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help=_adapters)
    ] = None,
    models: Annotated[Path | None, typer.Option(metavar="FOLDER", help=_models)] = None,
    max_model_len: Annotated[int, typer.Option(min=0, help=_context)] = 0,
    chat_template: Annotated[str, typer.Option(metavar="FILE", help=_template)] = "",
    allowed_hosts: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=_hosts)
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help=_cors)
    ] = None,
    connections: Annotated[int, typer.Option(min=1, help=_connections)] = 2048,
    ema: Ema = False,
    weights: Weights = "float",
    invariant: Annotated[bool, typer.Option("--invariant", help=_invariant)] = False,
    draft: Draft = "",
    ahead: Ahead = 0,
    early_layer: EarlyLayer = 0,
    plugin: PluginModules = None,
    layout: Spread = None,
) -> int:
    """Serve a trained model over HTTP as OpenAI's clients ask for it, with metrics and a chat page."""
    import psutil
    import torch

    from weft.checkpoint.model import open_model, tokenizer_of
    from weft.checkpoint.model_family import ModelFamily, model_folders
    from weft.data.chat.chat_template import template_text
    from weft.generate.drafter import check_ahead, drafter_for
    from weft.generate.engine import Engine, check_prompt
    from weft.generate.leader import follow_leader, mesh_of_rank
    from weft.generate.policies import policy_of
    from weft.generate.start import as_rank, launch_ranks, leads
    from weft.layout.layout import Layout
    from weft.models.products import read_only
    from weft.shapes.carried_files import context_length

    try:
        from weft.serve.front import front_of, room_for
        from weft.serve.gate import gate_rules
        from weft.serve.many_models import add_models
        from weft.serve.server import Server
        from weft.serve.service import Service, add_adapters
    except ImportError as error:
        raise UsageError(
            f"serving needs the package {error.name}: pip install 'weft[serve]'"
        ) from None
    keys = read_keys(api_key) if api_key else []
    spread, device = (
        Layout.parse(layout or ""),
        "cuda" if torch.cuda.is_available() else "cpu",
    )
    if invariant and spread.world > 1:
        raise UsageError("--invariant is for a model on one rank; leave out --layout")
    if models and (spread.world > 1 or invariant):
        raise UsageError(
            "--models is for one rank, without --invariant; leave these out"
        )
    folders = model_folders(models, warn) if models else []
    import_plugins(plugin)
    check_ahead(draft, ahead, early_layer, spread.world)
    order = policy_of(policy)
    template = chat_template and template_text(chat_template, "--chat-template")
    # mistakes are said before anything is read
    gate_rules(host, allowed_hosts or (), cors or ())
    if (code := launch_ranks(spread, checkpoint)) is not None:
        return code
    with as_rank(spread, device) as device:
        listening = _listen(host, port) if leads() else None
        model, files, _ = open_model(
            checkpoint, device, warn, ema, mesh_of_rank(spread, device)
        )
        check_prompt(model, [0])
        family = ModelFamily(model, weights) if models else None
        model = family.base if family else model
        read_only(model, weights)
        if listening is None:
            follow_leader(model)
            return 0
        drafter = drafter_for(draft, model, warn, ahead, early_layer)
        engine = Engine(
            model,
            cache or None,
            budget,
            requests,
            order,
            drafter=drafter,
            invariant=invariant,
            ranks=spread.world > 1,
        )
        name = name or checkpoint.rstrip("/").split("/")[-1]
        tokenizer = tokenizer_of(files, checkpoint, warn)
        served = list[str]()
        if family:
            served += add_models(engine, family, folders, tokenizer, name, warn)
        if not cache:
            here = psutil.virtual_memory().available // int(
                os.environ.get("LOCAL_WORLD_SIZE", "1")
            )
            free = here if device == "cpu" else torch.cuda.mem_get_info()[0]
            cache = engine.fit(int(SHARE * free))
        served += add_adapters(engine, adapters, name) if adapters else []
        service = Service(engine, requests + waiting)
        if template:
            tokenizer = replace(tokenizer, chat_template=template, named_templates={})
        server = Server(
            service,
            tokenizer,
            name,
            keys,
            tokens,
            served,
            max_model_len or context_length(files),
        )
        rules = gate_rules(listening.getsockname()[0], allowed_hosts or (), cors or ())
        if (room := room_for(connections)) < connections:
            warn(
                f"{room} connections at a time, not {connections}: the system lets a process open no more files"
            )
        front = front_of(server, rules, warn, drain, room)
        where = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        if not keys and host not in ("127.0.0.1", "::1", "localhost"):
            warn(
                f"whoever can reach {host} can ask; give --api-key FILE to ask for a key"
            )
        print(
            f"{name} at {where}/v1, with a cache of {cache:,} tokens; Ctrl-C ends it",
            flush=True,
        )
        if not keys and "*" in rules.origins:
            warn(
                "with --cors '*' every page that a browser here visits can ask; give --api-key FILE to ask for a key"
            )
        if spread.world > 1:
            threading.Thread(
                target=_end_with, args=(service, front), daemon=True
            ).start()
        with suppress(KeyboardInterrupt):  # which comes again after the last answer
            front.run(sockets=[listening])
        service.close()
        if service.failure is not None and spread.world > 1:
            raise service.failure
        engine.close()
    return 0


def _end_with(service: "Service", front: "uvicorn.Server") -> None:
    """End the server when its engine cannot go on, so that the other ranks end too and are named."""
    while service.failure is None:
        time.sleep(0.2)
    front.should_exit = True


def _listen(host: str, port: int) -> Socket:
    try:
        return listen(host, port)
    except OSError as error:
        raise UsageError(
            f"cannot listen at {host} port {port}: {error.strerror}; give another --host or --port"
        ) from None
