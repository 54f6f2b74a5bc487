"""The Python API: what ranks of its own are handed, and how their outcome comes back."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.cases import recipe, write_corpus
from weft.api import _outcome_of, _words_of, start
from weft.checkpoint.run_state import Progress
from weft.checkpoint.s3 import S3Storage
from weft.checkpoint.storage import LocalStorage, Storage
from weft.train.training import Outcome


@pytest.mark.parametrize(
    "place", [None, LocalStorage(Path("runs/a/step-3")), S3Storage("bucket", "a/b")]
)
def test_an_outcome_comes_back_as_it_was(place: Storage | None) -> None:
    progress = Progress(3, 24, 999, 3)
    outcome = Outcome(Path("runs/a"), place, progress, [1.5, 0.25], signal.SIGTERM)
    assert _outcome_of(json.loads(json.dumps(_words_of(outcome)))) == outcome


@pytest.mark.soak  # every day with the recipe of tests/test_footprint.py
def test_ranks_of_its_own_return_their_outcome(tmp_path: Path) -> None:
    given = recipe(write_corpus(tmp_path), layout__dp=2, train__steps=2)
    outcome = start(given, tmp_path / "run")
    assert outcome.run == tmp_path / "run" and outcome.progress.step == 2
    assert outcome.checkpoint and outcome.checkpoint.holds("weft.json")
    assert outcome.interrupted == 0
