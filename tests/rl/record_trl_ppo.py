"""One update of TRL's PPO on a small policy and critic that both sides can make: recorded in ``trl_ppo.json``.

Made with TRL 1.12.0, the last one with a PPO trainer, by ``python tests/rl/record_trl_ppo.py``, where that, datasets
and accelerate are installed. TRL's own ``PPOTrainer.train`` computes values, rewards of tokens, generalised advantages,
their whitening, both losses and all gradients. Only the sampling of answers and the scores of the reward model are
written down here, and policy and critic move a little between sampling and update, as in a later epoch.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.train.trl_peer import SHAPE, save_model

RECORDED = Path(__file__).with_name("trl_ppo.json")
PROMPTS = [[2, 27, 12, 5, 24, 1, 3], [2, 5, 28, 1, 3], [2, 13, 24, 1, 3], [2, 9, 1, 3]]
#: All of the trainer's full length, as TRL gives the reward to the token behind a shorter one.
ANSWERS = [
    [13, 24, 4, 13, 23, 1],
    [5, 4, 16, 19, 19, 17],
    [18, 19, 22, 6, 31, 1],
    [8, 9, 4, 13, 7, 30],
]
SCORES = [1.0, -0.5, 0.25, 2.0]
#: Shares of other values that are added to policy, critic and reference model (of seeds 1, 4 and 1).
MOVED, MOVED_CRITIC, AWAY = 0.06, 0.02, 0.15
SETTINGS = {
    "gamma": 0.97,
    "lam": 0.9,
    "kl_coef": 0.1,
    "cliprange": 0.1,
    "cliprange_value": 0.03,
    "vf_coef": 0.2,
}
SCORER = SHAPE.model_copy(update={"output": "score"})


def record() -> dict[str, Any]:
    """Losses and norms of all gradients, of policy and critic."""
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)

        def load(kind: Any, seed: int) -> Any:
            scores = kind is AutoModelForSequenceClassification
            path = folder / f"{seed}{scores}"
            if not path.exists():
                save_model(path, seed, SCORER if scores else SHAPE)
            more = {"num_labels": 1} if scores else {}
            return kind.from_pretrained(path, dtype=torch.float64, **more)

        def move(model: Any, kind: Any, seed: int, share: float) -> None:
            with torch.no_grad():
                others = load(kind, seed).parameters()
                for mine, more in zip(model.parameters(), others, strict=True):
                    mine.add_(share * more)

        policy, reference = (load(AutoModelForCausalLM, 1) for _ in range(2))
        move(reference, AutoModelForCausalLM, 2, AWAY)
        critic = load(AutoModelForSequenceClassification, 4)
        reward = load(AutoModelForSequenceClassification, 5)
        tokenizer = AutoTokenizer.from_pretrained(folder / "1False")
        tokenizer.padding_side = "left"
        count = len(ANSWERS)
        args = PPOConfig(
            output_dir=work, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, num_ppo_epochs=1,
            num_mini_batches=1, per_device_train_batch_size=count, gradient_accumulation_steps=1, total_episodes=count,
            local_rollout_forward_batch_size=count, response_length=len(ANSWERS[0]), num_sample_generations=0,
            temperature=1.0, missing_eos_penalty=None, kl_estimator="k1", save_strategy="no", **SETTINGS,
        )  # fmt: skip
        rows = Dataset.from_list([{"input_ids": prompt} for prompt in PROMPTS])
        trainer = PPOTrainer(args, tokenizer, policy, reference, reward, rows, critic)
        plain_reward, plain_forward = ppo_trainer.get_reward, ppo_trainer.forward

        def order(queries: torch.Tensor) -> list[int]:
            """Which prompts the rows of a padded batch are."""
            cut = [[t for t in row if t != tokenizer.pad_token_id] for row in queries.tolist()]  # fmt: skip
            return [PROMPTS.index(prompt) for prompt in cut]

        def generate(model: Any, queries: torch.Tensor, *_: Any) -> Any:
            answers = torch.tensor([ANSWERS[i] for i in order(queries)])
            texts = torch.cat((queries, answers), 1)
            logits = plain_forward(model, texts, tokenizer.pad_token_id).logits
            return texts, logits[:, queries.shape[1] - 1 : -1]

        def score(model: Any, texts: torch.Tensor, pad: int, context: int) -> Any:
            if model is not reward:
                return plain_reward(model, texts, pad, context)
            found = torch.tensor([SCORES[i] for i in order(texts[:, :context])])
            return None, found.double(), None

        def forward(model: Any, *given: Any) -> Any:
            if hasattr(model, "value_model"):  # the update
                move(model.policy, AutoModelForCausalLM, 3, MOVED)
                kind = AutoModelForSequenceClassification
                move(model.value_model, kind, 6, MOVED_CRITIC)
            return plain_forward(model, *given)

        def step(*_: Any, **__: Any) -> None:
            for name, model in (("policy", policy), ("critic", critic)):
                result[name] = {
                    key: p.grad.norm().item()
                    for key, p in model.named_parameters()
                    if p.grad is not None
                }

        def log(metrics: dict[str, float], *_: Any) -> None:
            result["metrics"] = metrics

        ppo_trainer.batch_generation = generate
        ppo_trainer.get_reward = score
        ppo_trainer.forward = forward
        trainer.optimizer.step = step
        trainer.log = log
        trainer.train()
    wanted = ("loss/policy_avg", "loss/value_avg", "policy/clipfrac_avg", "val/clipfrac_avg")  # fmt: skip
    return result | {"metrics": {key: result["metrics"][key] for key in wanted}}


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(record(), indent=1) + "\n")
