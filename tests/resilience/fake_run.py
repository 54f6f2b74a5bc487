"""Stands for ``weft train`` where the injector itself is tested: its files and signals, and processes that do nothing.

    python fake_run.py OUT RANKS [--fault twice|loss|skips|hangs|accuses]

A rank that ends, or is stopped for longer than :data:`DETECT`, leaves the view. ``--fault``: what it does wrong then.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import psutil

DETECT, STEP = 0.25, 0.01


def main(out: Path, ranks: int, fault: str) -> int:
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    idle = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(120)"]
    view = [{"number": n, "process": psutil.Popen(idle)} for n in range(ranks)]
    (out / "ranks").mkdir(parents=True)
    records = (out / "metrics.jsonl").open("a", buffering=1)
    stopped: dict[int, float] = {}

    def log(kind: str, step: int, **values: object) -> None:
        records.write(
            json.dumps(
                {"kind": kind, "step": step, "time": round(time.time(), 3), **values}
            )
            + "\n"
        )

    def agree(epoch: int, step: int, lost: list[dict[str, object]]) -> None:
        members = [
            {
                "number": m["number"],
                "rank": rank,
                "host": "127.0.0.1",
                "port": 1,
                "pid": m["process"].pid,
            }
            for rank, m in enumerate(view)
        ]
        (out / "ranks/new.json").write_text(
            json.dumps({"epoch": epoch, "members": members})
        )
        (out / "ranks/new.json").rename(out / "ranks/members.json")
        if lost:
            seconds = {
                "part_s": 0.001,
                "agree_s": 0.002,
                "rebuild_s": 0.003,
                "recover_s": 0.004,
            }
            log(
                "view",
                step,
                epoch=epoch,
                ranks=len(view),
                lost=lost,
                layout=f"dp={len(view)}",
                **seconds,
            )

    try:
        agree(1, 0, [])
        step, epoch = 0, 1
        while not stopping:
            time.sleep(STEP)
            lost: list[dict[str, object]] = []
            for rank, member in enumerate(list(view)):
                status, number = member["process"].status(), member["number"]
                since = (
                    stopped.setdefault(number, time.time())
                    if status == psutil.STATUS_STOPPED
                    else None
                )
                if since is None:
                    stopped.pop(number, None)
                if status == psutil.STATUS_ZOMBIE or (
                    since and time.time() - since > DETECT
                ):
                    lost.append({"number": number, "rank": rank, "why": "is gone"})
                    view.remove(member)
            if lost:
                epoch += 1
                if fault == "accuses" and epoch == 2:
                    lost.append(
                        {"number": view[0]["number"], "rank": 0, "why": "is gone"}
                    )
                agree(epoch, step, lost)
                time.sleep(STEP)  # that step once more
            step += 2 if lost and fault == "skips" else 1
            while lost and fault == "hangs" and not stopping:
                time.sleep(STEP)
            log(
                "train",
                step,
                loss=1 / step + (1e-6 if fault == "loss" and epoch > 1 else 0),
                tokens=8 * step,
            )
            if lost and fault == "twice":
                log("train", step, loss=1 / step, tokens=8 * step)
    finally:
        for member in psutil.Process().children():
            member.kill()
    return 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), (sys.argv[3:] or [""])[0]))
