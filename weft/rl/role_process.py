"""A process of a role of reinforcement learning: of the reference model, or of a critic (:mod:`weft.rl.critic_work`).

It connects with the training run that has started it, learns which model to build, and answers until the run ends: the
reference model gets texts, and gives log-probabilities. Several such processes may divide the model or the texts among
them, as a layout says: the first one has the texts, and gives them to the others.
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
from weft.net.wire import SealedConnection
from weft.parallel.build import Built, parallelize
from weft.recipe import ModelShape, Recipe, Train
from weft.rl.log_probabilities import token_log_probabilities
from weft.rl.role_texts import packed_numbers, shared_texts
from weft.run.rank_processes import own_device, rank_process, settle_in

#: The variable with the secret of the channel to the run, and seconds that connecting may take.
SECRET, DIAL_S = "WEFT_ROLE_SECRET", 30.0


def role_channel(name: str) -> str:
    """Return the name of the channel between a run and the processes of the role ``name``, such as "reference"."""
    return f"role-{name}"


def run_role_process(run: Address, name: str) -> None:
    """Serve the training run whose endpoint is at ``run`` as a process of its role ``name``, until the run ends.

    An error is told to the run, which ends with it, and is exit code 1 of the process.
    """
    rank = int(os.environ.get("RANK", "0"))
    endpoint = process_endpoint(own_address(run[0]))
    channel = endpoint.join(role_channel(name), os.environ.get(SECRET, ""))
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
            # a critic is trained, as on a rank of a run
            if layout.world > 1 or name == "critic":
                ranks = rank_process(device, about["timeout"], about["threads"])
                stack.enter_context(ranks)
                mesh = Mesh.create(layout, own_device(device))
            else:
                settle_in(device, about["threads"])
                mesh = Mesh.single(torch.device(device))
            if device == "cuda":  # as on ranks that train
                torch.set_float32_matmul_precision("high")
            if name == "critic":
                from weft.rl.critic_work import serve_critic

                serve_critic(connection, about, mesh)
            else:
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
        texts = shared_texts(frame, mesh)
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


if __name__ == "__main__":
    host, port, role = sys.argv[1:]
    run_role_process((host, int(port)), role)
