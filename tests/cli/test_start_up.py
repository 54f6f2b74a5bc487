"""Commands that need no PyTorch do not wait for it: it takes seconds to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

RUN = """
import sys
sys.argv = ["weft", *{words}]
try:
    from weft.cli import main
    main()
finally:
    heavy = {{"torch", "numpy", "scipy", "plotly", "transformers"}} & sys.modules.keys()
    print("imported", *heavy, file=sys.stderr)
"""


@pytest.mark.parametrize(("words", "code"), [
    (["--help"], 0),
    (["train", "--help"], 0),
    (["checkpoint", "--help"], 0),
    (["checkpoint", "convert", "--help"], 0),
    (["recipes"], 0),
    (["techniques"], 0),
    (["schedule", "zb-v"], 0),
    (["train", "no-such-recipe"], 1),
    (["train", "quickstart", "--set", "train.stepz=1"], 2),
])  # fmt: skip
def test_no_pytorch_for_what_needs_none(words: list[str], code: int) -> None:
    done = subprocess.run([sys.executable, "-c", RUN.format(words=words)], capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == "imported"
