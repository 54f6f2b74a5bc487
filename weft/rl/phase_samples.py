"""From the scored answers of a rollout phase to the samples that a policy loss learns from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weft.data.policy_rows import PolicySample
from weft.parallel.reference_weights import REFERENCE
from weft.rl.advantages import ScoredAnswer, token_advantages
from weft.rl.log_probabilities import TokenReadings, token_readings
from weft.rl.recorded_loader import shares_prompts
from weft.train.own_critic import critic_of

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.parallel.build import Built
    from weft.rl.reference_processes import ReferenceProcesses
    from weft.rl.rl_phases import RlPhases
    from weft.rl.scored_answers import ScoredGroup


@dataclass(frozen=True)
class AnswerArrays:
    """Token ids of a prompt and its answer, as one sequence of ``n`` tokens, with further numbers for each token,
    ``[n]``.

    ``ids``: token ids. ``learns``: whether the policy has written the token. ``sampler``: log-probability with which a
    written token was sampled; 0 for other tokens.
    """

    ids: np.ndarray
    learns: np.ndarray
    sampler: np.ndarray


def phase_samples(
    groups: Sequence[ScoredGroup],
    job: RlPhases,
    built: Built,
    mesh: Mesh,
    elsewhere: ReferenceProcesses | None = None,
    seconds: dict[str, float] | None = None,
) -> list[PolicySample]:
    """Return the training samples of all answers of a rollout phase, group by group. All ranks must call it.

    Computes the advantages, and the log-probabilities that the loss needs: under the weights before the first update,
    and under the reference model. ``built``: the model that is trained, and its state. ``elsewhere``: the reference
    model in other processes; None: it is beside the policy, or the loss needs none. ``seconds``: gets the times of the
    passes: ``old_s`` of policy and critic, ``reference_wait_s`` of the reference model or of waiting for it, and
    ``reference_s`` of its own work.
    """
    loss = job.loss
    texts = [
        [_arrays(group, number) for number in range(len(group.rewards))]
        for group in groups
    ]
    flat = [text for group in texts for text in group]
    old = reference = values = None
    begun = time.perf_counter()
    if elsewhere is not None:  # which then computes meanwhile
        elsewhere.request([(t.ids.tolist(), t.learns.tolist()) for t in flat])
    if needs_old(job):
        old, _, values = _readings(flat, job, built, mesh)
        if (critic := critic_of(built.state)) is not None:
            values = _readings(flat, job, critic, mesh).values
    read = time.perf_counter()
    if elsewhere is not None:
        reference = elsewhere.log_probabilities()
    elif loss.needs_reference:
        with built.state.swapped(REFERENCE):
            reference = _readings(flat, job, built, mesh).log_probabilities
    if seconds is not None and reference is not None:
        waited = time.perf_counter() - read
        seconds |= {"old_s": read - begun, "reference_wait_s": waited}
        seconds.setdefault("reference_s", waited)
    count = iter(range(len(flat)))
    scored = [
        [
            ScoredAnswer(
                reward,
                text.learns,
                old[i] if old else None,
                reference[i] if reference else None,
                values[i] if values else None,
            )
            for text, reward, i in zip(of_group, group.rewards, count, strict=False)
        ]
        for of_group, group in zip(texts, groups, strict=True)
    ]
    valued = [each for group in token_advantages(scored, loss) for each in group]
    return [
        PolicySample(
            text.ids,
            text.learns,
            value.advantage,
            text.sampler,
            old[i] if old else None,
            reference[i] if reference else None,
            value.returns,
            values[i] if values else None,
        )
        for i, (text, value) in enumerate(zip(flat, valued, strict=True))
    ]


def needs_old(job: RlPhases) -> bool:
    """Return whether the job needs log-probabilities or values under the weights before the first update of a phase."""
    loss = job.loss
    in_reward = loss.needs_reference and loss.kl_in == "reward"
    late = job.rl.staleness > 0
    return (
        job.updates_per_phase > 1
        or late
        or loss.correction.weight != "none"
        or in_reward
        or loss.needs_values
    )


def _readings(
    texts: Sequence[AnswerArrays], job: RlPhases, built: Built, mesh: Mesh
) -> TokenReadings:
    rows, passes = job.recipe.rows_per_pass(mesh.layout)
    return token_readings(
        built.model,
        built.state,
        mesh,
        [(text.ids.tolist(), text.learns.tolist()) for text in texts],
        rows,
        passes,
        job.recipe.data.seq_len,
        job.rl.temperature,
        shares_prompts(job, mesh.layout, job.shape),
    )


def _arrays(group: ScoredGroup, number: int) -> AnswerArrays:
    """Return the arrays of answer ``number`` of a group."""
    prompt, answer = group.group.request.prompt, group.group.answers[number]
    ids = np.array([*prompt, *answer.ids], np.int64)
    learns = np.arange(len(ids)) >= len(prompt)
    if answer.learns is not None:
        learns[len(prompt) :] = answer.learns
    sampler = np.zeros(len(ids))
    sampler[len(prompt) :] = answer.log_probabilities
    return AnswerArrays(ids, learns, sampler)
