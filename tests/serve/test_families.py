"""What a server says over HTTP of tokens' log-probabilities, beside transformers with the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.models.test_hugging_face import ours, theirs
from tests.serve.running import Running
from weft.data.tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers")

FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral with windows", "gemma3", "mixtral", "qwen3 moe", "deepseek v3",
)  # fmt: skip
PROMPT, WRITTEN = list(range(3, 47)), 6


@contextmanager
def served(folder: Path) -> Iterator[Running]:
    running = Running(load_tokenizer("bytes"), model=ours(folder))
    try:
        yield running
    finally:
        running.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    """Of a prompt longer than windows and blocks, and of what is written after it, one token at a time."""
    reference = theirs(family, tmp_path)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(WRITTEN):
            likeliest = reference(ids).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, likeliest], -1)
        scores = reference(ids).logits[0].double().log_softmax(-1)
    asked = {"prompt": PROMPT, "max_tokens": WRITTEN, "temperature": 0, "echo": True}
    with served(tmp_path) as running:
        answer = running.post("completions", **asked, logprobs=2, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    logs = answer.json()["choices"][0]["logprobs"]
    expected = scores[:-1].gather(1, ids[0, 1:, None])[:, 0]
    assert logs["token_logprobs"][1:] == pytest.approx(expected.tolist(), abs=2e-4)
    best = scores[:-1].max(-1).values
    said = [max(top.values()) for top in logs["top_logprobs"][1:]]
    assert said == pytest.approx(best.tolist(), abs=2e-4)
