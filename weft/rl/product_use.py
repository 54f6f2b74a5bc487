"""Whether updates take the products of the passes that wrote their answers, and the check that both agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.generate.written_passes import WrittenPasses
from weft.rl.known_products import (
    COMPARED,
    give_known_products,
    kept_rows,
    most_mismatch,
    sampler_mismatch,
    take_back_products,
    takes_known_products,
)

if TYPE_CHECKING:
    from weft.data.batch import Batch
    from weft.data.policy_rows import PolicySample
    from weft.layout.mesh import Mesh
    from weft.parallel.build import Built
    from weft.rl.generation_turns import GenerationTurns
    from weft.rl.rl_phases import RlPhases
    from weft.rl.rollout import GroupRequest
    from weft.train.step_loader import RunRecords


@dataclass
class ProductUse:
    """Keeps what the passes that write answers compute, and gives it to the update that learns from them.

    Attributes:
        ``job``: the checked recipe with its tasks.
        ``mesh``: this rank's position among the ranks of the run.
        ``built``: the model that is trained, and its state.
        ``recorder``: writes the run's records, and prints.
        ``turns``: the model that generates, and this rank's part in generation.
        ``written``: what the passes that wrote the present samples have computed, for the update that learns from them.
        ``compared``: whether known products were compared with passes that multiply again; ``trusted``: whether they
            agree.
        ``multiplied``: difference of log-probabilities of the sampler to such passes, for the next record of the
            policy.
    """

    job: RlPhases
    mesh: Mesh
    built: Built
    recorder: RunRecords
    turns: GenerationTurns
    written: WrittenPasses | None = None
    compared: bool = False
    trusted: bool = True
    multiplied: dict[str, float] = field(default_factory=dict)

    def keep(self, requests: Callable[[], Sequence[GroupRequest]]) -> None:
        """Keep what passes compute from now on, if the update that learns from their answers can use it.

        ``requests``: returns the requests for these answers.
        """
        self.written = None
        if not self.trusted or not takes_known_products(
            self.job, self.built, self.turns.generation
        ):
            return
        take_back_products(self.built.model)  # of a step that was not taken
        self.turns.passes = self.written = WrittenPasses(self._most_tokens(requests))

    def end_phase(self, complete: bool) -> None:
        """Keep nothing more. ``complete``: whether all answers are written; else what was kept is dropped."""
        self.turns.passes = None
        if not complete:
            self.written = None

    def give(self, batch: Batch, samples: Sequence[PolicySample], phase: int) -> None:
        """Let the update over ``batch``, of ``samples`` of rollout phase ``phase``, take its products from what was
        kept, if something was, and record whether it does.

        The first time in a process some answers are computed again, and no products are taken from then on if
        log-probabilities differ by more than roundings.
        """
        written, self.written = self.written, None
        if written is None:
            return
        known = kept_rows(written, batch) is not None
        if known and not self.compared:
            self.compared = True
            apart = sampler_mismatch(
                self.built, self.mesh, samples[:COMPARED], self.job.rl.temperature
            )
            limit = most_mismatch(next(self.built.model.parameters()).dtype)
            self.multiplied = {"mismatch": apart.mean, "mismatch_max": apart.most}
            if not apart.most <= limit:
                self.trusted = False
                self.multiplied = {}  # which the update measures
                self.recorder.event(
                    f"the passes that write answers differ from those that learn by up to {apart.most:.2g} in "
                    f"log-probabilities, roundings by {limit:g}: updates compute all products again from now on"
                )
        taken = self.trusted and give_known_products(self.built.model, written, batch)
        why = written.lost or ("a token is missing" if self.trusted else "mismatch")
        self.recorder.log(
            "products", phase=phase, taken=taken, why="" if taken else why
        )

    def _most_tokens(self, requests: Callable[[], Sequence[GroupRequest]]) -> int:
        """Return how many tokens the passes that write the answers to ``requests()``, and to those that replace some
        of them, compute at most.
        """
        rl = self.job.rl
        if not self.job.answers_at_once:
            answers = self.job.answers * (1 + rl.redraw)
            return answers * (self.job.recipe.data.seq_len + 1)
        prompts = [len(request.prompt) for request in requests()]
        spare = len(prompts) * rl.redraw
        most = sum(prompts) + spare * self.job.recipe.data.seq_len
        return most + (len(prompts) + spare) * rl.group * rl.tokens
