"""Records of reinforcement learning: what the policy loss sees, bytes between processes, and answers to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weft.layout.mesh import from_all
from weft.models.policy_loss import PolicyObjective
from weft.rl.kept_phases import keep_phase
from weft.train.own_critic import critic_of

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.parallel.build import Built
    from weft.rl.reward_workers import RewardWorkers
    from weft.rl.rl_phases import RlPhases
    from weft.rl.rollout import SentWeights, WrittenAnswer
    from weft.rl.scored_answers import ScoredGroup
    from weft.train.step_loader import RunRecords


def log_policy(
    recorder: RunRecords, built: Built, mesh: Mesh, more: Mapping[str, float]
) -> bool:
    """Record what people watch of the policy loss since the last phase, such as entropy. Collective.

    ``built``: the model that is trained, and its state. ``more``: further values of the record. Returns whether there
    was something to record.
    """
    objective = built.model.hooks.objective
    assert isinstance(objective, PolicyObjective)
    if (critic := critic_of(built.state)) is not None:
        of_values = critic.model.hooks.objective
        assert isinstance(of_values, PolicyObjective)
        objective.figures.take_values(of_values.figures)
    figures = objective.figures.take(mesh)
    if not figures["policy.tokens"]:
        return False
    named = {name.removeprefix("policy."): value for name, value in figures.items()}
    recorder.log("policy", **{**named, **more})
    return True


def reward_figures(workers: Sequence[RewardWorkers], mesh: Mesh) -> dict[str, int]:
    """Return the bytes of requests to servers of reward models, and of their replies, since the last phase, of all
    ranks. Collective.
    """
    own = [each.travelled for each in workers]
    for each in workers:
        each.travelled = (0, 0)
    pairs = [pair for of_rank in from_all(own, mesh.step_group) for pair in of_rank]
    return {
        "reward_sent_bytes": sum(sent for sent, _ in pairs),
        "reward_received_bytes": sum(received for _, received in pairs),
    }


def sent_figures(before: SentWeights, now: SentWeights, mesh: Mesh) -> dict[str, int]:
    """Return the bytes of weights that all ranks have sent to engines since the last phase, and have not sent as they
    had not changed. Collective.

    ``before``, ``now``: what this rank has sent, by the end of the last phase and of this one.
    """
    own = (now.sent - before.sent, now.spared - before.spared)
    shares = from_all(own, mesh.step_group)
    return {
        "weights_bytes": sum(sent for sent, _ in shares),
        "weights_spared_bytes": sum(spared for _, spared in shares),
    }


def keep_examples(
    recorder: RunRecords,
    job: RlPhases,
    phase: int,
    groups: Sequence[ScoredGroup],
    first: bool,
) -> None:
    """Record a few answers with their rewards, for the browser of samples in the report.

    ``first``: whether this is the first rank, which also keeps all answers of the phase, if the recipe asks for it.
    """
    shown = [
        {
            "question": str(group.group.request.question.prompt),
            "answers": [
                _example(job, answer, reward)
                for answer, reward in zip(
                    group.group.answers, group.rewards, strict=True
                )
            ],
        }
        for group in groups[:2]
    ]
    recorder.log("answers", phase=phase, groups=shown)
    if job.rl.keep and first:
        text_of = job.questions.answer_text
        keep_phase(recorder.folder, phase, groups, text_of, job.rl.keep)


def _example(job: RlPhases, answer: WrittenAnswer, reward: float) -> dict[str, Any]:
    """Return an answer as the report shows it, with the reward of each turn if it has several."""
    text = job.questions.answer_text(answer.ids)
    shown: dict[str, Any] = {"text": text, "reward": reward}
    if answer.trajectory is not None:
        shown["turns"] = [
            {
                "text": turn.message,
                "reward": turn.reward,
                "seen": "\n".join(seen.content for seen in turn.observations),
            }
            for turn in answer.trajectory.turns
            if turn.source == "agent"
        ]
    return shown
