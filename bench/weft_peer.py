"""Weft in another process, or of another tree, for bench/serve.py: lines of prompts come in, tokens and seconds go out.

Started by ``bench/serve.py --before FOLDER`` with that folder as ``PYTHONPATH``, so that only names are used here that
earlier versions have too, and by its case ``engines``. Seconds are by the clock, and of the processor.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress


def main() -> None:
    folder, cache, budget, threads = sys.argv[1], *map(int, sys.argv[2:])
    out = os.dup(1)
    os.dup2(2, 1)
    import torch

    from weft.checkpoint.model import open_model
    from weft.generate.engine import Engine
    from weft.generate.sampling import GREEDY
    from weft.models.products import read_only

    with suppress(ImportError):
        from weft.memory.heap import use_huge_pages

        use_huge_pages()  # as commands that open an engine do
    torch.set_num_threads(threads)
    model = open_model(folder, "cpu", lambda line: None)[0].float()
    read_only(model, "float")
    engine = Engine(model, tokens=cache, budget=budget)
    os.write(out, b'"ready"\n')
    for line in sys.stdin:
        prompts, tokens = json.loads(line)
        pool = engine.scheduler.pool
        pool.known.clear()  # blocks of earlier turns
        pool.keys.clear()
        begun, spent = time.perf_counter(), time.process_time()
        texts = [engine.submit(prompt, tokens, GREEDY)[0] for prompt in prompts]
        engine.run()
        took = time.perf_counter() - begun, time.process_time() - spent
        answer = json.dumps([[text.written for text in texts], *took])
        os.write(out, (answer + "\n").encode())


if __name__ == "__main__":
    main()
