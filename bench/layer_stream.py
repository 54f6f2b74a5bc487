"""A prompt computed by one engine for another: from the end of its last layer to the other engine's first step.

Blocks are sent when a pass over a part of the prompt has ended, as before, or layer by layer while it goes on. Both
engines are threads of this process, joined by a loopback connection that is slowed to ``--rate``; the ways take turns.

    OMP_NUM_THREADS=1 python bench/layer_stream.py [--rate 125e6] [--json bench/results/layer_stream.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from weft.cluster.mover import MOVES, AnswerMove, take_in
from weft.generate.block_contents import bytes_of
from weft.generate.engine import Engine
from weft.generate.engine_thread import EngineThread
from weft.generate.migration import Arrival, Departure, MoveFrame
from weft.generate.sampling import GREEDY
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.net.endpoint import Endpoint
from weft.net.wire import SealedConnection
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

SHAPE = {"vocab": 1000, "layers": 12, "embed": 256, "heads": 8, "kv_heads": 8, "ffn": 512}  # fmt: skip


def build() -> Transformer:
    return parallelize(ModelShape(**SHAPE), Mesh.single(), Train(seed=1))[0]


def handed_over(
    models: Sequence[Transformer], tokens: int, budget: int, layered: bool, rate: float
) -> dict[str, float]:
    """Seconds of a handover, and bytes that were sent."""
    source, target = (Engine(model, budget=budget) for model in models)
    for engine in (source, target):
        engine.block_form()
    ends, begins, came = list[float](), list[float](), list[int]()
    last = models[0].blocks[str(len(models[0].blocks) - 1)]
    hook = last.register_forward_hook(lambda *_: ends.append(time.monotonic()))
    start = target.reader.start

    def starting(*step: Any) -> Callable[[], torch.Tensor]:
        begins.append(time.monotonic())
        return start(*step)

    target.reader.start = starting  # type: ignore[method-assign]
    threads = [EngineThread(engine) for engine in (source, target)]
    points = [Endpoint("127.0.0.1") for _ in range(2)]

    def arrive(connection: SealedConnection) -> None:
        arrival = Arrival(target)

        def land(frame: MoveFrame) -> bool:
            def taken() -> bool:
                moved = arrival.take(frame)
                if moved is not None:
                    came.append(moved.computed)
                    threads[1].tells[moved] = lambda _: None
                return moved is not None

            return threads[1].call(taken).result()

        take_in(connection, land, arrival.keep, 60)

    channels = [points[1].open(MOVES, "s", arrive), points[0].join(MOVES, "s")]
    dial, stream = channels[1].dial, Departure.stream

    def slow_dial(*given: Any) -> SealedConnection:
        connection = dial(*given)
        send = connection.send

        def slow_send(head: Any, payload: Any = ()) -> None:
            time.sleep(sum(view.nbytes for view in payload) / rate)
            send(head, payload)

        connection.send = slow_send  # type: ignore[method-assign]
        return connection

    channels[1].dial = slow_dial  # type: ignore[method-assign]
    if not layered:
        Departure.stream = lambda *_: None  # type: ignore[method-assign]
    try:
        ids = [(7 * i + i * i) % SHAPE["vocab"] for i in range(tokens)]

        def begin() -> AnswerMove:
            (request,) = source.submit(ids, 400, GREEDY)
            threads[0].tells[request] = lambda _: None
            return AnswerMove(threads[0], request, lambda _: None, after_first=True)

        begun, move = time.monotonic(), threads[0].call(begin).result()
        report = move.send_away(channels[1], points[1].address, {})
        assert not report.why, report.why
        while not begins:
            time.sleep(1e-3)
        prompt_end = ends[-(-tokens // budget) - 1]
        assert report.payload == bytes_of(target.block_form(), 1) * came[0]
        return {
            "prompt": prompt_end - begun,
            "after": begins[0] - prompt_end,
            "bytes": report.payload,
        }
    finally:
        Departure.stream = stream  # type: ignore[method-assign]
        hook.remove()
        for thread in threads:
            thread.close()
        for point in points:
            point.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rate", type=float, default=125e6, help="bytes/s")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    models, rows = [build(), build()], dict[str, Any]()
    for budget in (256, given.tokens):
        times: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for _ in range(given.turns):
            for layered, each in times.items():
                each.append(
                    handed_over(models, given.tokens, budget, layered, given.rate)
                )
        for layered, each in times.items():
            way = "layer by layer" if layered else "after the pass"
            rows[f"{way}, {budget} tokens a pass"] = {
                "prompt s": statistics.median(one["prompt"] for one in each),
                "last layer to first step s": statistics.median(
                    o["after"] for o in each
                ),
                "bytes": each[0]["bytes"],
            }
    about = {"tokens": given.tokens, "rate bytes/s": given.rate, **SHAPE}
    print(json.dumps({"about": about, "rows": rows}, indent=1))
    if given.json:
        given.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
