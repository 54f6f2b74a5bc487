"""The job of a real server: it combines updates as its recipe says, and ends when its time is over."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from weft.errors import UsageError
from weft.federated.combined_updates import RobustSum
from weft.federated.server_invitation import (
    ServerInvitation,
    new_server_secret,
    read_server_invitation,
)
from weft.federated.server_job import prepare_server
from weft.layout.mesh import Mesh
from weft.recipe import build_recipe
from weft.train.guard import Guard
from weft.train.training import open_loop


def test_a_real_server_takes_the_robust_rule_and_ends_after_its_seconds(
    tmp_path: Path,
) -> None:
    recipe = build_recipe({
        "model": {"layers": 1, "embed": 8, "heads": 2}, "train": {"batch": 2, "threads": 1},
        "validation": {"every": 0}, "data": {"seq_len": 8, "cache": str(tmp_path)},
        "federated": {"listen": "127.0.0.1:0", "aggregate": "krum", "seconds": 0.05, "rounds": 3},
    })  # fmt: skip
    with ExitStack() as stack:
        loop = open_loop(
            prepare_server(recipe), Mesh.single(), Guard(tmp_path / "run", None), stack
        )
        loader: Any = loop.loader
        assert isinstance(loader.server.policy.combine, RobustSum)
        loop.run()
        assert loader.over == "federated.seconds = 0.05 are over"
        assert not loop.stopped


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"aggregate": "medianx"}, "federated.aggregate = 'medianx'"),
        ({"listen": "localhost:99999"}, "ports end at 65535"),
        ({"listen": "::1:7800"}, "federated.listen"),
        ({"secure": True, "policy": "scaffold-m"}, "control variates"),
        ({"secure": True, "per_round": 1}, "hides nothing"),
    ],
)
def test_settings_of_a_server_that_cannot_be_are_named(
    settings: dict[str, Any], words: str
) -> None:
    tree = {"federated": {"listen": "[::1]:0", **settings}}
    with pytest.raises(UsageError, match=words) as error:
        prepare_server(build_recipe(tree))
    assert "'listen':" not in str(error.value)


@pytest.mark.parametrize("host", ["::1", "10.0.0.1", "peer:0abc", "fed.example"])
def test_an_invitation_is_read_as_it_was_written(host: str) -> None:
    invitation = ServerInvitation(host, 7800, new_server_secret(), True)
    assert read_server_invitation(str(invitation)) == invitation
