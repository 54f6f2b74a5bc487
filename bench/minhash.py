"""Near-duplicates by Weft's operator beside datasketch, datatrove and rensa: documents a second, and which are dropped.

    nice -n 5 python bench/minhash.py --peers VENV/bin/python [--documents 12000] [--rounds 3] [--json FILE]

The peers stand in a venv of their own (``pip install datasketch datatrove rensa tokenizers spacy 'xxhash<3.6'``).
Documents are pieces of about 3,000 characters of the standard library, a part of them repeated with some of their
words replaced. In every round all read the same documents one after the other, each on one core in a process of its
own. Figures are by the processor's time, as the machine may have other work, and of the fastest round.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from step import machine, write

from weft.curation.data_pipeline import DataStep
from weft.curation.documents import Documents

RESULTS = Path(__file__).parent / "results" / "minhash.json"
PIECE = 3_000
#: Documents of a shard.
SHARD = 2_000
#: Share of the documents that are copies, and shares of their words that are replaced.
COPIES, CHANGES = 0.3, (0.0, 0.01, 0.02, 0.05, 0.1)


def pieces() -> list[str]:
    """Return pieces of the standard library's files, cut at line ends."""
    root = Path(sysconfig.get_paths()["stdlib"])
    result: list[str] = []
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        piece, size = [], 0
        for line in path.read_text(errors="replace").splitlines(keepends=True):
            piece.append(line)
            size += len(line)
            if size >= PIECE:
                result.append("".join(piece))
                piece, size = [], 0
        result += ["".join(piece)] if size > 200 else []
    return result


def documents(count: int, seed: int = 0) -> list[str]:
    """Return so many documents, in random order, of which some are copies of others with words replaced."""
    chance = random.Random(seed)
    originals = pieces()
    chance.shuffle(originals)
    originals = originals[: int(count * (1 - COPIES))]
    words = " ".join(originals[:200]).split()
    texts = list(originals)
    while len(texts) < count:
        change = chance.choice(CHANGES)
        parts = chance.choice(originals).split(" ")
        texts.append(" ".join(chance.choice(words) if chance.random() < change else p for p in parts))  # fmt: skip
    chance.shuffle(texts)
    return texts


def weft(texts: list[str]) -> dict[str, Any]:
    """Return what the operator drops, and how long it takes from texts to decisions, in shards."""
    operator: Any = DataStep(operator="minhash", keep="first").build()
    ids = [f"{number:06}" for number in range(len(texts))]
    shards = [
        Documents(ids[i : i + SHARD], texts[i : i + SHARD])
        for i in range(0, len(texts), SHARD)
    ]
    operator.summarize(shards[0].select(range(5)))
    began, used = time.perf_counter(), time.process_time()
    summaries = [operator.summarize(shard) for shard in shards]
    decisions = operator.decide([shard.ids for shard in shards], summaries)
    reasons = [reason for decision in decisions for reason in decision.reasons]
    return {
        "seconds": time.perf_counter() - began,
        "processor seconds": time.process_time() - used,
        "dropped": [number for number, reason in enumerate(reasons) if reason],
    }


def asked(command: list[str]) -> dict[str, Any]:
    """Return the answer of a process of one thread."""
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}  # fmt: skip
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), **threads}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[1])} if command[0] == sys.executable else {}  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=1800
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} has failed:\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", help="Python of the venv with the peers")
    parser.add_argument("--documents", type=int, default=12_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--ours", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        print(json.dumps(weft(json.loads(Path(options.ours).read_text()))))
        return
    if not options.peers:
        parser.error("--peers: give the Python of the venv with the peers")
    facts = machine()
    texts = documents(options.documents)
    rounds: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "texts.json")
        path.write_text(json.dumps(texts))
        peer = [options.peers, "-P", str(Path(__file__).with_name("minhash_peer.py"))]
        commands = {
            "weft": [sys.executable, __file__, "--ours"],
            **{name: [*peer, name] for name in ("datasketch", "rensa", "datatrove")},
        }
        for number in range(options.rounds):
            for name, command in commands.items():
                answer = asked([*command, str(path)])
                rounds.setdefault(name, []).append(answer)
                used = answer["processor seconds"]
                print(f"round {number + 1}: {name}: {used:.2f} s", flush=True)
    rows = {
        name: {
            "documents/s": len(texts) / min(a["processor seconds"] for a in answers),
            "documents/s by the clock": len(texts) / min(a["seconds"] for a in answers),
            "processor seconds": [a["processor seconds"] for a in answers],
            "dropped": len(answers[0]["dropped"]),
        }
        for name, answers in rounds.items()
    }
    rate = rows["weft"]["documents/s"]
    ratios = {
        name: rate / row["documents/s"] for name, row in rows.items() if name != "weft"
    }
    for name, row in rows.items():
        each = f"{row['documents/s']:10,.0f} documents/s"
        print(f"{name:12} {each}, {row['dropped']} dropped")
    print("ours / theirs:", {name: round(ratio, 1) for name, ratio in ratios.items()})
    results = {
        "machine": facts,
        "documents": len(texts),
        "characters of a document": sum(map(len, texts)) / len(texts),
        "rows": rows,
        "ours / theirs": ratios,
    }
    write(results, options.json)


if __name__ == "__main__":
    main()
