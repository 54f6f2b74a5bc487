"""How well the slowdown by other programs on this host is predicted, on windows that nothing has learned from.

    python bench/planner/interference.py [--windows N] [--out bench/results/planner_interference.json]

A small model's step is timed beside two probes, window after window, amid whatever else runs on the machine. The first
half teaches the predictor (its own second half sets the bounds); the second half judges it, beside the mean of the
first half and the last window.
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import torch
from script import run

from weft.rehearse.interference import COVERED, judged, small_step, watch_windows


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted slowdown on a shared host.")
    parser.add_argument("--windows", type=int, default=400)
    parser.add_argument("--out", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    windows = watch_windows(small_step(), options.windows)
    report = judged(windows, options.windows // 2)
    step = windows[:, 2] / np.quantile(windows[:, 2], 0.02)
    record = {
        "command": f"python bench/planner/interference.py --windows {options.windows}",
        "windows": options.windows, "asked": COVERED, "load": [round(before, 1), round(os.getloadavg()[0], 1)],
        "slowdown": {str(q): round(float(np.quantile(step, q)), 2) for q in (0.1, 0.5, 0.9)},
        **{name: round(value, 3) for name, value in report.items()},
    }  # fmt: skip
    print(json.dumps(record, indent=1))
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
