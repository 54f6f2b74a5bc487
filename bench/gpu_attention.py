"""The attention kernels of a GPU: errors against float64, and times of cuDNN's beside flash attention's.

python bench/gpu_attention.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import traceback
from pathlib import Path
from typing import Any

import torch

from weft.models import gpu_attention

T = torch.Tensor
#: Batch, query heads, key/value heads, tokens, head dimension.
SMALL = (
    (2, 6, 2, 333, 64),
    (1, 9, 3, 512, 64),
    (2, 8, 8, 1000, 128),
    (1, 4, 1, 640, 80),
)
LARGE = (
    (2, 32, 8, 8192, 64),
    (4, 32, 8, 8192, 64),
    (1, 32, 8, 8192, 128),
    (8, 16, 16, 2048, 64),
)


def drawn(shape: tuple[int, ...]) -> tuple[T, ...]:
    batch, heads, shared, tokens, width = shape
    # as they lie in a model: tokens before heads
    return tuple(
        torch.randn(
            batch, tokens, h, width, device="cuda", dtype=torch.bfloat16
        ).transpose(1, 2)
        for h in (heads, shared, shared, heads)
    )


def errors(shape: tuple[int, ...], causal: bool) -> dict[str, float]:
    """Relative errors of output, log-sum-exp and gradients against float64."""
    q, k, v, grad = drawn(shape)
    wide = [x.double() for x in (q, k, v, grad)]
    out, lse = gpu_attention.attend_rectangle(*wide[:3], causal)
    right = (
        out,
        lse,
        *gpu_attention.rectangle_gradients(wide[3], *wide[:3], out, lse, causal),
    )
    out, lse = gpu_attention.attend_rectangle(q, k, v, causal)
    ours = (
        out,
        lse,
        *gpu_attention.rectangle_gradients(grad, q, k, v, out, lse, causal),
    )
    names = ("out", "lse", "dq", "dk", "dv")
    return {
        n: float((a.double() - b).norm() / b.norm())
        for n, a, b in zip(names, ours, right, strict=True)
    }


def times(shape: tuple[int, ...]) -> tuple[float, float]:
    """Milliseconds of forward and of backward, causal."""
    from triton.testing import do_bench  # which machines without a GPU lack

    q, k, v, grad = drawn(shape)
    out, lse = gpu_attention.attend_rectangle(q, k, v, True)
    there = do_bench(
        lambda: gpu_attention.attend_rectangle(q, k, v, True),
        5,
        40,
        return_mode="median",
    )

    def back() -> Any:
        return gpu_attention.rectangle_gradients(grad, q, k, v, out, lse, True)

    return float(there), float(do_bench(back, 5, 60, return_mode="median"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in ("cudnn", "flash"):
        torch.backends.cuda.enable_cudnn_sdp(name == "cudnn")
        for shape in (*SMALL, *LARGE):
            for causal in (True, False):
                row: dict[str, Any] = {"kernel": name, "shape": shape, "causal": causal}
                try:
                    if shape in SMALL:
                        row["errors"] = errors(shape, causal)
                    elif causal:
                        row["forward_ms"], row["backward_ms"] = times(shape)
                        flops = 2 * shape[0] * shape[1] * shape[3] ** 2 * shape[4] / 1e9
                        row["tflops"] = (
                            flops / row["forward_ms"],
                            2.5 * flops / row["backward_ms"],
                        )
                    else:
                        continue
                except Exception as error:
                    traceback.print_exc()
                    row["failed"] = str(error)[:300]
                rows.append(row)
                shown = {
                    k: v
                    for k, v in row.items()
                    if k not in ("kernel", "shape", "causal")
                }
                print(name, shape, "causal" if causal else "full", shown, flush=True)
    if args.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
