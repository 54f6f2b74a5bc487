"""One call for all segments of a row with shared prompts gives what a call for each gives."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from bench.gpu_prompts import SMALL, errors
from weft.models import prompt_attention
from weft.models.prompt_attention import gathered_count, gathered_keys


@pytest.mark.parametrize("name", SMALL)
def test_one_call_gives_the_same(name: str) -> None:
    """Output and gradients; products stand in for the GPU's kernel, which the script compares on a GPU."""
    for each in errors(SMALL[name], "cpu").values():
        assert max(each.values()) < 1e-12


def test_prompts_that_are_not_gathered_are_noticed() -> None:
    def blind(
        edges: tuple[int, ...], parents: tuple[int, ...], *rest: object
    ) -> object:
        return gathered_keys(edges, (-1,) * len(parents), *rest)

    with mock.patch.object(prompt_attention, "gathered_keys", blind):
        differences = errors(SMALL["mixed"], "cpu")["shared"]
    assert min(differences.values()) > 1e-2


def test_a_segment_sees_its_prompt_before_itself() -> None:
    """Segments without tokens are left out, and prompts need not be next to their answers."""
    edges, parents = (0, 2, 2, 5, 6, 8), (-1, 0, -1, 0, 2, -1)
    index, queries, keys = gathered_keys(edges, parents, torch.device("cpu"))
    assert index.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 2, 3, 4, 6, 7]
    assert queries.bounds.tolist() == [0, 2, 5, 6, 8] and queries.longest == 3
    assert keys.bounds.tolist() == [0, 2, 5, 8, 13] and keys.longest == 5


def test_keys_are_not_gathered_where_a_long_prompt_would_be_repeated() -> None:
    """Two answers to a prompt, and an empty segment, which sees nothing."""
    assert gathered_count((0, 5, 7, 8, 8), (-1, 0, 0, 0)) == 5 + (5 + 2) + (5 + 1)
