"""What writes and reads for a user, of the user's own, does all that Weft's own of its kind do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.checkpoint import foreign
from tests.conftest import Command
from tests.generate.test_many import build
from weft.checkpoint.convert import Foreign, open_foreign
from weft.checkpoint.convert.foreign import shape_beside
from weft.checkpoint.convert.rules import sources_by_name
from weft.checkpoint.convert.shards import as_stored, load_tree
from weft.checkpoint.convert.sources import checkpoint_format
from weft.checkpoint.source_format import SourceFormat
from weft.errors import UsageError
from weft.generate.drafter import Drafter, drafter_for
from weft.generate.engine import Engine
from weft.generate.policies import (
    Order,
    SchedulingPolicy,
    compared_policies,
    exact_fill,
    policy_of,
)
from weft.generate.request import Generation, Request
from weft.recipe import ModelShape
from weft.registry import register

pytestmark = pytest.mark.usefixtures("no_plugins")


def test_a_policy() -> None:
    """It is named as Weft's own are, and compared with them."""

    @register("policy", "last-first")
    class LastFirst(SchedulingPolicy):
        """The latest request first."""

        candidates = ("last-first",)

        def __call__(
            self, running: Sequence[Request], waiting: Sequence[Request], budget: int
        ) -> Order:
            return [*exact_fill(running, waiting, budget)][::-1]

    assert compared_policies()[-1] == "last-first"
    engine = Engine(
        build("softmax", torch.float32), policy=policy_of("last-first"), budget=8
    )
    requests = [engine.submit(range(1, 9), 1)[0] for _ in range(3)]
    engine.step()
    assert [bool(one.written) for one in requests] == [False, False, True]
    with pytest.raises(UsageError, match="nothing comes behind last-first"):
        policy_of("last-first:3")


def test_a_drafter() -> None:
    """Its guesses are checked, and change no token."""

    @register("drafter", "again")
    class Again(Drafter):
        """Guesses that the last token comes again."""

        def propose(self, requests: Sequence[Generation]) -> None:
            for one in requests:
                one.drafts = [one.ids[-1:]]

    model = build("softmax", torch.float32)
    drafter = drafter_for("again", model, print)
    assert type(drafter) is Again
    texts = []
    for given in (None, drafter):
        engine = Engine(model, drafter=given)
        (request,) = engine.submit([1, 2, 3], 8)
        engine.run()
        texts.append(request.written)
    assert texts[0] == texts[1]
    with pytest.raises(UsageError, match="give --draft MODEL"):
        drafter_for("again", model, print, ahead=1)


def test_a_module_on_the_command_line(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("own_policy.py").write_text(
        "from weft import register\n"
        "from weft.generate.policies import SchedulingPolicy\n"
        "@register('policy', 'own')\n"
        "class Own(SchedulingPolicy): ...\n"
    )
    words = ("serve", "--from", "nowhere", "--policy")
    code, _, said = command(*words, "owm", "--plugin", "own_policy")
    assert code == 2 and "did you mean 'own'?" in said
    code, _, said = command(*words, "own", "--plugin", "own_policies")
    assert code == 2 and "--plugin: there is no module" in said


def test_a_format(tmp_path: Path) -> None:
    """A folder is known by what is in it, before Weft's own formats where it says so, and read tensor by tensor."""
    shape = ModelShape(vocab=61, layers=2, embed=16, heads=2, head_dim=8, ffn=20)
    weights = foreign.weights_of(shape)
    renamed = {f"their.{name}": w for name, w in weights.items()}
    foreign.write_config(tmp_path, shape)
    torch.save(renamed, tmp_path / "all.weights")

    @register("format", "theirs")
    class Theirs(SourceFormat):
        """One file with everything."""

        patterns = ("*.weights",)

        @staticmethod
        def open(path: Path, config: Path | None) -> Foreign:
            tensors = load_tree(path / "all.weights")
            stored = {
                name.removeprefix("their."): [as_stored(name, t, path / "all.weights")]
                for name, t in tensors.items()
            }
            made = sources_by_name(stored)
            return Foreign("theirs", path, shape_beside(path, config), made)

    opened = open_foreign(tmp_path)
    assert opened.kind == "theirs"
    assert all(torch.equal(opened.read(name), w) for name, w in weights.items())
    (tmp_path / "x.gguf").touch()
    assert checkpoint_format(tmp_path) == "gguf"
    Theirs.place = 1
    assert checkpoint_format(tmp_path) == "theirs"
    assert checkpoint_format(tmp_path / "all.weights") is None
    with pytest.raises(UsageError, match="did you mean 'theirs'"):
        open_foreign(tmp_path, "their")
