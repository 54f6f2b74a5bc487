"""The page about torchrun, Slurm and Kubernetes: what it has the reader type is what the commands take, and runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer.main
from service_faults import export_tiny, free_port

from tests.cluster.inprocess import Cluster
from tests.test_tutorials import files_of, parse
from weft.cli.app import app
from weft.cli.cluster_engine import _clear_mark, _mark
from weft.cluster.cluster_settings import read_cluster
from weft.errors import UsageError
from weft.serve.engine_table import read_engines

PAGE = (Path(__file__).parents[2] / "docs/how-to/serve-on-clusters.md").read_text()
SCRIPT, MANIFEST = files_of(PAGE)["serve.sbatch"], files_of(PAGE)["weft.yaml"]


def typed_commands() -> Iterator[list[str]]:
    """The words behind ``weft`` of every command in the page's shell blocks."""
    for block in re.findall(r"(?s)```bash[^\n]*\n(.*?)```", PAGE):
        for line in block.splitlines():
            if match := re.search(r"(?:^|-m |\" |=8 )weft ((?:serve|engine|top) .*)", line):  # fmt: skip
                yield shlex.split(match[1].rstrip(" &"), comments=True)


def test_commands_are_taken_by_the_commands() -> None:
    commands = [*typed_commands()]
    assert len(commands) == PAGE.count("weft serve --ch") + PAGE.count("weft engine --ch") + 1  # fmt: skip
    for words in commands:
        parse(typer.main.get_command(app), words)
    with pytest.raises(Exception, match="No such option"):
        parse(typer.main.get_command(app), [*commands[0], "--enginez", "2"])


def option(words: list[Any], name: str) -> str:
    value: str = words[words.index(name) + 1]
    return value


def test_the_manifest_is_consistent(tmp_path: Path) -> None:
    """Its commands are taken, and what refers to something by name refers to what is there."""
    yaml = pytest.importorskip("yaml")
    objects = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(MANIFEST)}  # fmt: skip
    file = tmp_path / "cluster.toml"
    file.write_text(objects["ConfigMap", "weft"]["data"]["cluster.toml"])
    listen = read_cluster(file).listen
    pods = {
        name: objects[kind, name]["spec"]["template"]
        for kind, name in (("Deployment", "weft-router"), ("StatefulSet", "weft-engine"))
    }  # fmt: skip
    for name, pod in pods.items():
        (container,) = pod["spec"]["containers"]
        program, *words = container["command"]
        assert program == "weft" and all(isinstance(word, str) for word in words)
        parse(typer.main.get_command(app), words)
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounts = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]}
        assert {m["name"] for m in container["volumeMounts"]} == {*volumes}, name
        assert any(option(words, "--checkpoint").startswith(f"{p}/") for p in mounts)
        stops = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0])  # fmt: skip
        needed = int(option(words, "--drain")) + int(stops[-1])
        assert pod["spec"]["terminationGracePeriodSeconds"] > needed
        assert container["env"][0]["name"] == "WEFT_SECRET"
    router, engine = (pod["spec"]["containers"][0] for pod in pods.values())
    assert option(router["command"], "--cluster") == "/etc/weft/cluster.toml"
    ports = {port["name"]: port["containerPort"] for port in router["ports"]}
    own, at = int(option(router["command"], "--port")), int(listen.rpartition(":")[2])
    assert ports == {"http": own, "join": at}
    assert option(engine["command"], "--join") == f"weft-join:{ports['join']}"
    for service, port in (("weft", "http"), ("weft-join", "join")):
        spec = objects["Service", service]["spec"]
        assert spec["selector"] == pods["weft-router"]["metadata"]["labels"]
        assert spec["ports"] == [{"name": port, "port": ports[port]}]
    joined = option(engine["command"], "--joined-file")
    assert engine["readinessProbe"]["exec"]["command"] == ["test", "-e", joined]
    assert router["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    # every kind and every setting that is not Kubernetes' own grammar has its line in the page
    for word in (
        "publishNotReadyAddresses",
        "Recreate",
        "Parallel",
        "terminationGracePeriodSeconds",
        "/dev/shm",
    ):
        assert PAGE.count(word) >= 2, word


# --- typed for real ---


def until(come: Callable[[], Any], seconds: float = 120, every: float = 0.2) -> None:
    deadline = time.monotonic() + seconds
    while not come():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(every)


def engines_of(port: int) -> int:
    try:
        return len(read_engines(f"http://127.0.0.1:{port}").engines)
    except Exception:
        return -1


def ask(port: int) -> Any:
    body = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": "Bearer a key"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["text"]


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_a_file_says_whether_an_engine_has_joined(tmp_path: Path) -> None:
    file = tmp_path / "joined"
    seen = list[bool]()

    def joined(has: bool) -> None:
        _mark(file, has)
        seen.append(file.exists())

    with Cluster(0) as cluster:
        cluster.engines.append(cluster.add("e", joined=joined))
        until(lambda: seen == [True], every=0.01)
        cluster.engines[0].cut()
        until(lambda: seen == [True, False, True], every=0.01)
    assert not file.exists()
    with pytest.raises(UsageError, match=r"--joined-file .* cannot be written"):
        _mark(tmp_path / "no/folder", True)


def test_no_probe_sees_an_engine_that_has_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start of an engine removes the mark of the one before, and never makes its own to try the folder."""
    file, opened = tmp_path / "joined", list[str]()
    file.touch()
    monkeypatch.setattr(Path, "touch", lambda path: opened.append(str(path)))
    _clear_mark(file)
    assert not file.exists() and not opened
    _clear_mark(file)
    assert not list(tmp_path.iterdir())


@pytest.mark.soak
def test_the_slurm_script_serves_and_drains(tmp_path: Path) -> None:
    """With a ``srun`` that runs everything on this host, on which both nodes are."""
    export_tiny(tmp_path)
    (tmp_path / "keys.txt").write_text("a key\n")
    (tmp_path / "bin").mkdir()
    srun = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
    program(tmp_path / "bin/srun", srun)
    program(tmp_path / "bin/scontrol", "#!/bin/sh\nprintf '127.0.0.1\\n127.0.0.1\\n'\n")
    program(tmp_path / "bin/weft", f'#!/bin/sh\nexec "{sys.executable}" -m weft "$@"\n')
    port, inner = free_port(), free_port()
    text = SCRIPT.replace("MODEL", "tiny --cache 4096").replace("8100", str(inner))
    text = text.replace("--host 0.0.0.0", f"--port {port}").replace("tp=8", "tp=2")
    program(tmp_path / "serve.sbatch", text)
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]"}  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen([tmp_path / "serve.sbatch"], cwd=tmp_path, env=env, stdout=log, stderr=log)  # fmt: skip
    try:
        until(lambda: engines_of(port) == 2)
        assert len(ask(port)) > 0
        ours = psutil.Process(job.pid).children(recursive=True)
        job.send_signal(signal.SIGTERM)
        job.wait(100)
        assert not psutil.wait_procs(ours, 20)[1]
    finally:
        for process in psutil.Process().children(recursive=True):
            if process.pid == job.pid or job.pid in map(lambda p: p.pid, process.parents()):  # fmt: skip
                process.kill()
    said = (tmp_path / "log").read_text()
    ended = re.findall(r"weft: engine \S+ ends\n", said)
    assert "Traceback" not in said and len(ended) == 2, said


@pytest.mark.soak
@pytest.mark.parametrize(("layout", "engines"), [([], 2), (["--layout", "tp=2"], 1)])
def test_torchrun_starts_engines(tmp_path: Path, layout: list[str], engines: int) -> None:  # fmt: skip
    """Two of them, or with a layout of two ranks one."""
    export_tiny(tmp_path)
    port, inner = free_port(), free_port()
    (tmp_path / "cluster.toml").write_text(f'[cluster]\nlisten = "127.0.0.1:{inner}"\n')
    env = os.environ | {"WEFT_SECRET": "s"}
    words = ["--checkpoint", "tiny", "--cache", "4096"]
    router = subprocess.Popen(
        [sys.executable, "-m", "weft", "serve", *words, "--cluster", "cluster.toml", "--port", str(port)],
        cwd=tmp_path, env=env,
    )  # fmt: skip
    launcher = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "weft", "engine", *words,
         "--join", f"127.0.0.1:{inner}", *layout],
        cwd=tmp_path, env=env,
    )  # fmt: skip
    try:
        until(lambda: engines_of(port) == engines)
        assert len(ask(port)) > 0
        ranks = psutil.Process(launcher.pid).children()
        for rank in ranks:
            rank.terminate()
        launcher.wait(60)
        until(lambda: engines_of(port) == 0)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=20)
    finally:
        for process in (launcher, router):
            process.send_signal(signal.SIGINT)
            process.wait(60)
    assert launcher.returncode == 0 and router.returncode == 0
