"""Fine-tuning SmolLM2-135M on conversations: Weft beside transformers, PEFT and TRL, by all weights and by LoRA.

Both sides start from the same weights and adapters and see the same rows, one conversation each, in the same order.
Each lives in a process of its own, for its peak of memory; they take turns, a few steps at a time. The peers pad to the
longest of a batch; Weft lays conversations behind each other. ``packed`` is Weft once more with several conversations
per row of the batch, which the peer would mix up; ``trl`` is its SFTTrainer, where installed (pip install trl).

    python bench/finetune.py [--steps 8] [--turns 4] [--json bench/results/finetune.json]
"""

from __future__ import annotations

import argparse
import json
import queue
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from step import machine

from weft.checkpoint.convert.peft import write_adapter
from weft.checkpoint.model import export_model
from weft.checkpoint.weights import starting_values
from weft.data.batch import Batch
from weft.data.loader import Loader
from weft.layout.mesh import Mesh
from weft.memory.heap import keep_heap
from weft.recipe import Recipe, load_recipe
from weft.train.setup import build_for_training, prepare
from weft.train.step import train_step

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "finetune.json"
METHODS = ("full", "lora")
LR = {"full": 2e-5, "lora": 1e-3}

#: One step on the rows of a number: its loss, and the tokens that were no padding.
Step = Callable[[int], tuple[float, int]]


def recipe_of(method: str, packed: bool, batch: int) -> Recipe:
    given = [
        f"train.batch={batch}",
        f"data.chat.pack={str(packed).lower()}",
        f"optimizer.lr={LR[method]}",
    ]
    recipe = load_recipe(ROOT / "recipes" / "finetune.toml", given)
    return recipe if method == "lora" else recipe.model_copy(update={"adapter": None})


def batch_of(recipe: Recipe, step: int, loader: Loader) -> Batch:
    batches = loader.step(step * recipe.train.batch)
    assert batches is not None
    (batch,) = batches
    return batch


def ends_of(batch: Batch) -> torch.Tensor:
    """How many tokens of every row are of conversations."""
    assert batch.documents is not None
    return (batch.documents >= 0).sum(1)


def ours(method: str, packed: bool, batch: int, folder: str, total: int) -> Step:
    keep_heap()  # as every rank of weft does
    recipe = recipe_of(method, packed, batch)
    job, mesh = prepare(recipe), Mesh.single()
    model, state = build_for_training(
        job.shape, mesh, recipe, starting_values(recipe, job.shape)
    )
    loader = job.loader(job.corpus.train, mesh)

    def step(number: int) -> tuple[float, int]:
        rows = batch_of(recipe, number, loader)
        found = train_step(model, state, [rows], mesh, lr=LR[method], clip=0.0)
        return found.loss, rows.document_tokens

    return step


def their_model(method: str, folder: str) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
    if method == "lora":
        model = PeftModel.from_pretrained(model, f"{folder}/adapter", is_trainable=True)
    return model.train()


def theirs(method: str, packed: bool, batch: int, folder: str, total: int) -> Step:
    recipe = recipe_of(method, packed, batch)
    job = prepare(recipe)
    loader = replace(job.loader(job.corpus.train, Mesh.single()), joined=False)
    model = their_model(method, folder)
    parameters = [p for p in model.parameters() if p.requires_grad]
    settings = recipe.optimizer
    optimizer = torch.optim.AdamW(
        parameters,
        LR[method],
        settings.betas,
        settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )

    def step(number: int) -> tuple[float, int]:
        rows = batch_of(recipe, number, loader)
        ends = ends_of(rows)
        longest = int(ends.max())
        mask = (torch.arange(longest) < ends[:, None]).long()
        logits = model(input_ids=rows.tokens[:, :longest], attention_mask=mask).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), rows.labels[:, :longest].flatten()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), rows.document_tokens

    return step


def by_trl(method: str, packed: bool, batch: int, folder: str, total: int) -> Step:
    """TRL's trainer runs its own loop in a thread, and takes each of its ``total`` steps when it is asked to."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    recipe = recipe_of(method, packed, batch)
    job, settings = prepare(recipe), recipe.optimizer
    loader = replace(job.loader(job.corpus.train, Mesh.single()), joined=False)
    examples, tokens = [], []
    for number in range(total):
        rows = batch_of(recipe, number, loader)
        tokens.append(rows.document_tokens)
        for ids, labels, end in zip(
            rows.tokens.tolist(),
            rows.labels.tolist(),
            ends_of(rows).tolist(),
            strict=True,
        ):
            # not shifted
            examples.append(
                {"input_ids": ids[:end], "labels": [-100, *labels[: end - 1]]}
            )
    asked, done = queue.Queue[int](), queue.Queue[float]()

    class Peer(SFTTrainer):
        def _get_train_sampler(self, *given: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def get_batch_samples(self, *given: Any) -> Any:
            asked.get()  # data and step are timed together
            return super().get_batch_samples(*given)

        def training_step(self, *given: Any, **named: Any) -> torch.Tensor:
            self.seen = super().training_step(*given, **named)
            return self.seen

        def _maybe_log_save_evaluate(self, *given: Any, **named: Any) -> None:
            done.put(self.seen.item())

    trainer = Peer(
        their_model(method, folder),
        SFTConfig(
            output_dir=f"{folder}/trl", max_steps=total, per_device_train_batch_size=batch, learning_rate=LR[method],
            lr_scheduler_type="constant", weight_decay=settings.weight_decay, adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1], adam_epsilon=settings.eps, max_grad_norm=0.0, max_length=None,
            gradient_checkpointing=False, use_cpu=True, bf16=False, save_strategy="no", logging_strategy="no",
            disable_tqdm=True, report_to=[],
        ),
        train_dataset=Dataset.from_list(examples), processing_class=AutoTokenizer.from_pretrained(f"{folder}/model"),
    )  # fmt: skip
    threads = torch.get_num_threads()

    def run() -> None:
        torch.set_num_threads(threads)  # it is each thread's own
        trainer.train()

    threading.Thread(target=run, daemon=True).start()

    def step(number: int) -> tuple[float, int]:
        asked.put(number)
        return done.get(), tokens[number]

    return step


def live(
    pipe: Any,
    make: Callable[..., Step],
    method: str,
    packed: bool,
    batch: int,
    folder: str,
    total: int,
) -> None:
    """One side: takes the numbers of steps, gives what they came to; None ends it."""
    torch.set_num_threads(2)
    step = make(method, packed, batch, folder, total)
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        begun, used = time.perf_counter(), time.process_time()
        loss, tokens = step(number)
        pipe.send(
            (loss, tokens, time.perf_counter() - begun, time.process_time() - used)
        )
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def compared(
    method: str, steps: int, turns: int, batch: int, folder: str
) -> dict[str, Any]:
    """Weft, its peers and the packed rows, in turns."""
    sides = {"weft": (ours, False), "peer": (theirs, False), "packed": (ours, True)}
    sides |= {"trl": (by_trl, False)} if find_spec("trl") else {}
    context, pipes = mp.get_context("spawn"), {}
    for name, (make, packed) in sides.items():
        pipes[name], end = context.Pipe()
        given = (end, make, method, packed, batch, folder, steps * turns)
        context.Process(target=live, args=given, daemon=True).start()
        pipes[name].recv()
    seen: dict[str, list[tuple[float, int, float, float]]] = {
        name: [] for name in sides
    }
    for turn in range(turns):
        for name, pipe in pipes.items():
            for number in range(turn * steps, (turn + 1) * steps):
                pipe.send(number)
                seen[name].append(pipe.recv())
    found: dict[str, Any] = {
        f"losses apart{note}": max(
            abs(a[0] - b[0]) for a, b in zip(seen["weft"], seen[peer], strict=True)
        )
        for peer, note in (("peer", ""), ("trl", " of trl"))
        if peer in seen
    }
    for name, pipe in pipes.items():
        pipe.send(None)
        rows = seen[name][1:]  # the first one warms up
        found[name] = {
            "tokens_per_s": statistics.median(n / wall for _, n, wall, _ in rows),
            "tokens_per_cpu_s": statistics.median(n / used for _, n, _, used in rows),
            "peak_gib": pipe.recv(),
            "losses": [loss for loss, *_ in seen[name]],
        }
    for measure in ("tokens_per_s", "tokens_per_cpu_s"):
        found[f"{measure}, ratio"] = found["weft"][measure] / found["peer"][measure]
        found[f"{measure}, ratio packed"] = (
            found["packed"][measure] / found["peer"][measure]
        )
        if "trl" in found:
            found[f"{measure}, ratio to trl"] = (
                found["weft"][measure] / found["trl"][measure]
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of("lora", False, given.batch)
        assert recipe.model.origin is not None
        export_model(recipe.model.origin, Path(folder, "model"), print)
        job = prepare(recipe)
        _, state = build_for_training(
            job.shape, Mesh.single(), recipe, starting_values(recipe, job.shape)
        )
        write_adapter(
            {h.name: h.local for h in state.held},
            job.shape,
            f"{folder}/model",
            Path(folder, "adapter"),
        )
        del state
        for method in METHODS:
            found = results[method] = compared(
                method, given.steps, given.turns, given.batch, folder
            )
            print(
                f"{method:<5} weft {found['weft']['tokens_per_s']:.0f} tokens/s, transformers"
                f"{' + PEFT' * (method == 'lora')} {found['peer']['tokens_per_s']:.0f}: "
                f"{found['tokens_per_s, ratio']:.2f}x ({found['tokens_per_cpu_s, ratio']:.2f}x of processor time; "
                f"packed {found['tokens_per_s, ratio packed']:.2f}x); peak {found['weft']['peak_gib']:.2f} against "
                f"{found['peer']['peak_gib']:.2f} GiB; losses apart {found['losses apart']:.1e}", flush=True,
            )  # fmt: skip
            if "trl" in found:
                print(
                    f"      TRL's SFTTrainer {found['trl']['tokens_per_s']:.0f} tokens/s: "
                    f"{found['tokens_per_s, ratio to trl']:.2f}x ({found['tokens_per_cpu_s, ratio to trl']:.2f}x of "
                    f"processor time); peak {found['trl']['peak_gib']:.2f} GiB; losses apart "
                    f"{found['losses apart of trl']:.1e}", flush=True,
                )  # fmt: skip
    given.json.write_text(
        json.dumps({"machine": machine(), "results": results}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
