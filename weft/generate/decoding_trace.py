"""Records a profiler's trace of decoding steps, in which many texts grow by one token each."""

from pathlib import Path

from weft.generate.engine import Engine
from weft.generate.request import check_generations
from weft.generate.sampling import GREEDY
from weft.models.transformer import Transformer
from weft.observe.time_split import quiet_profile


def trace_decoding(
    model: Transformer, batch: int, prompt: int, steps: int, folder: Path
) -> Path:
    """Write a Chrome trace of ``steps`` decoding steps to ``folder``, and return its file. ``batch`` texts are written,
    after random prompts of ``prompt`` tokens. The trace does not have the steps that read the prompts and write the
    first tokens. Raises :class:`weft.errors.WeftError` if a text could not go on.
    """
    engine = Engine(model, budget=max(512, batch), limit=batch)
    texts = [
        [(7 * number + i) % model.shape.vocab for i in range(prompt)]
        for number in range(batch)
    ]
    written = [engine.submit(ids, steps + 1, GREEDY)[0] for ids in texts]
    while not all(generation.written for generation in written):
        engine.step()
        check_generations(written)
    with quiet_profile() as profiler:
        engine.run()
    check_generations(written)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"batch-{batch}.json"
    profiler.export_chrome_trace(str(file))
    return file
