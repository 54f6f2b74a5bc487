"""Experts that were trained apart are one model: by Bayes over language models, by a router's weights over any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from weft.errors import UsageError
from weft.train.expert_join import (
    BayesRouter,
    evidence_before,
    joined_log_probabilities,
    joined_outputs,
)
from weft.train.expert_set import read_expert_set, write_expert_set

T = torch.Tensor


def document_scores(tokens: int, experts: int) -> T:
    """Log-probabilities of the tokens of a document by each expert, ``[tokens, experts]``."""
    random = torch.Generator().manual_seed(0)
    logs = torch.randn(tokens, experts, generator=random, dtype=torch.float64)
    return logs.sub(2).clamp(max=-1e-3)


def mixture(scores: T, router: BayesRouter) -> T:
    """Joint log-probability of each token, ``[tokens]``."""
    documents = torch.zeros(len(scores), dtype=torch.long)
    weights = router.log_weights(evidence_before(scores, documents))
    logs = [column[:, None] for column in scores.unbind(1)]
    return joined_log_probabilities(logs, weights)[:, 0]


def test_a_document_is_as_likely_as_by_the_mixture_of_whole_documents() -> None:
    scores, prior = document_scores(50, 3), (0.5, 0.3, 0.2)
    # of the last token nothing follows, which evidence leaves out
    whole = (torch.tensor(prior, dtype=torch.float64).log() + scores.sum(0)).logsumexp(
        0
    )
    together = mixture(scores, BayesRouter(prior))
    assert float(together.sum()) == pytest.approx(float(whole), rel=1e-12)
    assert mixture(scores, BayesRouter(prior, top=3)).equal(together)
    likeliest = mixture(scores, BayesRouter(prior, top=1))
    assert float(likeliest[0]) == float(scores[0, 0])  # the prior says
    assert (likeliest[:, None] == scores).any(1).all()
    certain = mixture(scores, BayesRouter((0.0, 1.0, 0.0)))
    assert torch.allclose(certain, scores[:, 1])


def test_evidence_begins_anew_with_each_document() -> None:
    scores = document_scores(12, 2)
    documents = torch.tensor([0] * 5 + [1] * 4 + [2] * 3)
    apart = [
        evidence_before(part, torch.zeros(len(part), dtype=torch.long))
        for part in scores.split([5, 4, 3])
    ]
    assert torch.allclose(evidence_before(scores, documents), torch.cat(apart))
    assert not apart[1][0].any()
    assert torch.allclose(apart[0][-1], scores[:4].sum(0))


def test_outputs_of_any_shape_are_joined_by_weights_of_each_sample() -> None:
    random = torch.Generator().manual_seed(0)
    outputs = [torch.randn(4, 2, 3, generator=random) for _ in range(3)]
    weights = torch.rand(4, 3, generator=random)
    weights /= weights.sum(1, keepdim=True)
    weights[0] = torch.tensor([0.0, 1.0, 0.0])
    outputs[0][0] = torch.nan  # of no weight in that sample
    together = joined_outputs(outputs, weights)
    assert torch.equal(together[0], outputs[1][0])
    for sample in range(1, 4):
        each = sum(w * x[sample] for w, x in zip(weights[sample], outputs, strict=True))
        assert torch.allclose(together[sample], torch.as_tensor(each))
    logs = [torch.randn(4, 7, generator=random).log_softmax(-1) for _ in range(3)]
    joint = joined_log_probabilities(logs, weights.log())
    assert torch.allclose(joint.exp(), joined_outputs([x.exp() for x in logs], weights))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "no set of experts"),
        ('{"experts": [{"name": "a"}]}', "no set of experts"),
        ('{"experts": []}', "lists no expert"),
        ('{"experts": [{"name": "a", "path": "a"}], "prior": [1, 2]}', "prior"),
        ('{"experts": [{"name": "a", "path": "a"}], "prior": [-1]}', "prior"),
        ('{"experts": [{"name": "a", "path": "a"}], "top": 2}', "top"),
        (json.dumps({"experts": [{"name": "a", "path": "a"}] * 2}), "two experts"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(
    tmp_path: Path, text: str, word: str
) -> None:
    (tmp_path / "experts.json").write_text(text)
    with pytest.raises(UsageError, match=word) as raised:
        read_expert_set(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_set_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_expert_set(tmp_path) is None
    (tmp_path / "code").mkdir()
    write_expert_set(tmp_path, ["code", "prose"], [2.0, 1.0], top=1)
    experts = read_expert_set(tmp_path)
    assert experts is not None and experts.names == ("code", "prose")
    assert experts.places == (str(tmp_path / "code"), "prose")
    assert experts.router == BayesRouter((2.0, 1.0), 1)
