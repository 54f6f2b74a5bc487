"""A process with the reference model of reinforcement learning: texts in, log-probabilities out.

It connects with the training run that has started it, learns which model to build, and answers until the run ends.
Several such processes may divide the model or the texts among them, as a layout says: the first one has the texts, and
gives them to the others.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack, suppress
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import WeftError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.net.endpoint import Address, process_endpoint
from weft.net.sockets import own_address
from weft.net.wire import Frame, SealedConnection
from weft.parallel.build import Built, parallelize
from weft.recipe import ModelShape, Recipe, Train
from weft.rl.log_probabilities import token_log_probabilities
from weft.rl.role_texts import MarkedText, packed_numbers, unpacked_texts
from weft.run.rank_processes import own_device, rank_process, settle_in

#: The name of the channel to the run, the variable with its secret, and seconds that connecting may take.
ROLES, SECRET, DIAL_S = "role-processes", "WEFT_ROLE_SECRET", 30.0


def run_role_process(run: Address) -> None:
    """Serve the training run whose endpoint is at ``run`` as a process with its reference model, until the run ends.

    An error is told to the run, which ends with it, and is exit code 1 of the process.
    """
    rank = int(os.environ.get("RANK", "0"))
    endpoint = process_endpoint(own_address(run[0]))
    channel = endpoint.join(ROLES, os.environ.get(SECRET, ""))
    try:
        connection = channel.dial(run, {"rank": rank}, DIAL_S)
    except OSError as error:
        print(f"weft: the run at {run} is not reached: {error}", file=sys.stderr)
        sys.exit(1)
    code = 0
    try:
        # without a limit, as the connection ends with the run
        about = connection.receive().head
        layout, device = Layout(**about["layout"]), about["device"]
        with ExitStack() as stack:
            if layout.world > 1:
                ranks = rank_process(device, about["timeout"], about["threads"])
                stack.enter_context(ranks)
                mesh = Mesh.create(layout, own_device(device))
            else:
                settle_in(device, about["threads"])
                mesh = Mesh.single(torch.device(device))
            built = reference_of(about, mesh)
            connection.send({"kind": "ready"})
            _answer(connection, built, mesh, about)
    except ConnectionError:
        pass  # the run has ended
    except (WeftError, ValueError, RuntimeError, OSError) as error:
        code = 1
        # PyTorch's own may have many lines
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        with suppress(OSError):
            connection.send({"kind": "error", "why": why})
            # longer than the run waits between two looks, so that it learns the cause before its effect on others
            connection.drain(1.0)
    # others may wait for ranks that have gone already
    os._exit(code)


def reference_of(about: dict[str, Any], mesh: Mesh) -> Built:
    """Build the reference model that the run describes by ``about`` (JSON values) on this rank of ``mesh``.

    Collective.
    """
    shape = ModelShape.model_validate(about["shape"])
    recipe = Recipe(
        model=ModelShape.model_validate({"from": about["model"] or None}),
        train=Train(**about["train"]),
    )
    values = None
    if about["model"]:
        from weft.checkpoint.weights import starting_values

        values = starting_values(recipe, shape)
    train = recipe.train.model_copy(update={"freeze": ("*",)})
    return parallelize(shape, mesh, train, values, about["room"], summed=False)


def _answer(
    connection: SealedConnection, built: Built, mesh: Mesh, about: dict[str, Any]
) -> None:
    """Answer all requests, each with the log-probabilities of the texts in it, until the connection ends."""
    leads = mesh.layout.world == 1 or dist.get_rank() == 0
    while True:
        frame, begun = connection.receive(), time.perf_counter()
        texts = _shared(frame, mesh)
        numbers = token_log_probabilities(
            built.model,
            built.state,
            mesh,
            texts,
            about["rows"],
            about["passes"],
            about["room"],
            about["temperature"],
            about["share"],
        )
        if leads:
            spent = time.perf_counter() - begun
            payload = [packed_numbers(numbers, texts)]
            connection.send({"kind": "numbers", "seconds": spent}, payload)


def _shared(frame: Frame, mesh: Mesh) -> list[MarkedText]:
    """Return the texts of the request ``frame``, of which only the first process has the contents. Collective."""
    given = [
        unpacked_texts(frame.payload, frame.head["lengths"]) if frame.payload else []
    ]
    if mesh.layout.world > 1:
        dist.broadcast_object_list(given, src=0)
    return given[0]


if __name__ == "__main__":
    host, port = sys.argv[1:]
    run_role_process((host, int(port)))
