"""The clients that people use, in an environment of their own: forty calls, and some of Anthropic's."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.serve.running import Running, until
from tests.serve.test_call_finder import HERMES
from weft.data.tokenizer import load_tokenizer

SCRIPT = Path(__file__).with_name("clients.py")
PACKAGES = ("openai", "langchain-openai", "instructor", "litellm", "anthropic")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the clients."""
    folder = tmp_path_factory.mktemp("clients")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
    installed = subprocess.run(
        [str(folder / "bin" / "pip"), "install", "-q", *PACKAGES],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    if installed.returncode:
        pytest.skip(
            f"the clients cannot be installed here: {installed.stderr.strip().splitlines()[-1]}"
        )
    return folder / "bin" / "python"


@pytest.mark.soak
def test_forty_calls_of_four_clients_and_eight_of_anthropics(python: Path) -> None:
    server = Running(
        replace(load_tokenizer("bytes"), chat_template=HERMES),
        keys=("secret",),
        tokens=16384,
    )
    asked = [str(python), str(SCRIPT), str(server.client.base_url), "tiny", "secret"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "48 of 48 calls ok (openai 10, langchain-openai 10, instructor 10, litellm 10, anthropic 8)"
        in done.stdout
    )
    until(server.empty)
    server.close()
