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
from weft.train.reference_layout import reference_beside

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.parallel.build import Built
    from weft.rl.critic_processes import CriticProcesses
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
    critic: CriticProcesses | None = None,
) -> list[PolicySample]:
    """Return the training samples of all answers of a rollout phase, group by group. All ranks must call it.

    Computes the advantages, and the log-probabilities that the loss needs: under the weights before the first update,
    and under the reference model. ``built``: the model that is trained, and its state. ``elsewhere``: the reference
    model in other processes; None: it is beside the policy, or the loss needs none. ``seconds``: gets the times of the
    passes: ``old_s`` of policy and critic, ``reference_wait_s`` of the reference model or of waiting for it,
    ``reference_s`` of its own work, ``values_s`` of a critic with layers of its own on these ranks, and
    ``critic_wait_s`` of waiting for one in other processes. ``critic``: such a critic; None: there is none, or it is on
    these ranks.
    """
    loss = job.loss
    texts = [
        [_arrays(group, number) for number in range(len(group.rewards))]
        for group in groups
    ]
    flat = [text for group in texts for text in group]
    old = reference = values = None
    begun = time.perf_counter()
    marked = []
    if critic is not None or elsewhere is not None:
        marked = [(t.ids.tolist(), t.learns.tolist()) for t in flat]
    if critic is not None:  # which then computes meanwhile
        critic.request(marked)
    if elsewhere is not None:  # which does, too
        elsewhere.request(marked)
    if needs_old(job):
        old, _, values = _readings(flat, job, built, mesh)
        if (beside := critic_of(built.state)) is not None:
            since = time.perf_counter()
            values = _readings(flat, job, beside, mesh).values
            if seconds is not None:
                seconds["values_s"] = time.perf_counter() - since
    read = time.perf_counter()
    if elsewhere is not None:
        reference = elsewhere.log_probabilities()
    elif loss.needs_reference:
        reference = _reference_readings(flat, job, built, mesh)
    if seconds is not None:
        seconds["old_s"] = read - begun
    if seconds is not None and reference is not None:
        seconds["reference_wait_s"] = waited = time.perf_counter() - read
        seconds.setdefault("reference_s", waited)
    if critic is not None:
        begun = time.perf_counter()
        values = critic.values()
        if seconds is not None:
            seconds |= {"critic_wait_s": time.perf_counter() - begun}
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
    if critic is not None:
        dues = [value.returns for value in valued if value.returns is not None]
        critic.learn_from(dues)
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


def _reference_readings(
    texts: Sequence[AnswerArrays], job: RlPhases, built: Built, mesh: Mesh
) -> list[np.ndarray]:
    """Return the log-probabilities of ``texts`` under the reference model on these ranks. Collective."""
    own = reference_beside(built.state)
    if own is not None:
        return _readings(texts, job, own.built, own.mesh).log_probabilities
    with built.state.swapped(REFERENCE):
        return _readings(texts, job, built, mesh).log_probabilities


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
