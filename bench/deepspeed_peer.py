"""DeepSpeed's ZeRO-Infinity as a peer of bench/tiers.py, in a Python of its own: batches in, losses and seconds out.

    apt-get install libaio-dev
    python -m venv VENV && VENV/bin/pip install torch==2.13.0+cpu transformers ninja deepspeed==0.19.8

Started by ``bench/tiers.py --deepspeed VENV/bin/python``. Weights and what AdamW keeps rest in files of ``folder``
(ZeRO's third stage, both offloads on "nvme"), on its CPU accelerator with its own CPU Adam; reads and writes are
pipelined, and what is updated together is as large as a block, so that there is something to pipeline.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

#: Buffers for parameters: with fewer than a block and what is fetched ahead need, its assertions fail. And for what is
#: updated: moments, weights and gradient of three groups, one in use, one coming and one leaving, and more at first.
PARAMETERS, STATES = 32, 16


def settings(
    folder: str, accumulated: int, block: int, largest: int, adam: dict[str, Any]
) -> dict[str, Any]:
    """``block``: numbers in a block; ``largest``: in the largest parameter; ``accumulated``: microbatches of a step."""
    place = {"device": "nvme", "nvme_path": folder, "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulated,
        "gradient_clipping": 1e9,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": block,
            "reduce_bucket_size": largest,
            "stage3_prefetch_bucket_size": block,
            "stage3_max_live_parameters": 3 * block,
            "stage3_max_reuse_distance": 2 * block,
            "stage3_param_persistence_threshold": 10_000,
            "offload_param": place | {"buffer_count": PARAMETERS, "buffer_size": largest, "max_in_cpu": 0},
            "offload_optimizer": place | {"buffer_count": STATES, "pipeline_read": True, "pipeline_write": True},
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False,
                "overlap_events": True},
        "steps_per_print": 1_000_000,
    }  # fmt: skip


def main() -> None:
    model, folder, accumulated, adam = (
        sys.argv[1],
        sys.argv[2],
        int(sys.argv[3]),
        json.loads(sys.argv[4]),
    )
    os.environ |= {
        "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOG_LEVEL": "error",
        # ninja compiles what is new
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    out = os.dup(1)
    os.dup2(2, 1)  # what the engine prints is no answer
    import deepspeed
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    theirs.config.use_cache = False
    sizes = [p.numel() for p in theirs.parameters()]
    block = sum(p.numel() for p in theirs.model.layers[0].parameters())
    engine, *_ = deepspeed.initialize(
        model=theirs,
        model_parameters=theirs.parameters(),
        config=settings(folder, accumulated, block, max(sizes), adam),
    )
    os.write(out, b'"ready"\n')
    for line in sys.stdin:
        batches = [
            {name: torch.tensor(values) for name, values in batch.items()}
            for batch in json.loads(line)
        ]
        total, loss = sum(int((batch["labels"] >= 0).sum()) for batch in batches), 0.0
        begun = time.perf_counter()
        for batch in batches:
            logits = engine(
                input_ids=batch["tokens"], position_ids=batch["positions"]
            ).logits
            part = (
                cross_entropy(
                    logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
                )
                / total
            )
            engine.backward(part * accumulated)
            loss += part.item()
            engine.step()
        os.write(out, (json.dumps([loss, time.perf_counter() - begun]) + "\n").encode())


if __name__ == "__main__":
    main()
