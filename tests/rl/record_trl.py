"""Policy losses as TRL computes them, on a small model that both sides can make: recorded in ``trl_losses.json``.

Made with TRL 1.16.0 by ``python tests/rl/record_trl.py``, where that, datasets and accelerate are installed. TRL's own
trainers compute rewards to advantages, log-probabilities, corrections, losses and gradients; only the sampling of
answers is replaced by answers that are written down here. Of the gradient of each parameter its norm and a scalar
product are kept.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.train.trl_peer import save_model

RECORDED = Path(__file__).with_name("trl_losses.json")
#: Answers in a group, and the largest number of tokens of an answer.
GROUP, LONGEST = 4, 14
#: Prompts and answers as token ids, two groups; the last token is the stop token but of two answers.
PROMPTS = [[2, 27, 12, 5, 24, 1, 3], [2, 5, 33 - 5, 1, 3]]
ANSWERS = [
    [13, 24, 4, 13, 23, 1],
    [5, 4, 16, 19, 19, 17, 31, 1],
    [18, 19, 1],
    [13, 24, 4, 13, 23, 4, 5, 4, 16, 19, 19, 17, 31, 4],
    [24, 12, 22, 9, 5, 8, 23, 1],
    [1],
    [6, 9, 7, 5, 25, 23, 9, 4, 13, 24, 4, 13, 23, 4],
    [5, 1],
]
#: What each of two judges says; None: nothing.
REWARDS: list[list[float | None]] = [
    [1.0, 0.0, 0.25, 0.5, 0.75, None, 0.0, 1.0],
    [0.5, 0.5, None, -0.25, 0.125, None, 1.0, 0.0],
]
WEIGHTS = [1.0, 0.5]
#: How far the policy has moved since it sampled, and from the reference model.
MOVED, AWAY = 0.06, 0.15
#: The seed of values with which gradients are multiplied, as norms alone do not tell their directions.
DIRECTION = 9

#: Settings of Weft's loss, and those of TRL's trainer.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {}, {"loss_type": "grpo"}),
    "grpo-kl": (
        "grpo",
        {"kl": "k3", "kl_weight": 0.3, "kl_ratio": True, "advantage": "batch", "dual_clip": 1.1, "clip_high": 0.05,
         "correction": {"weight": "sequence", "high": 1.09, "action": "zero"}},
        {"loss_type": "grpo", "beta": 0.3, "scale_rewards": "batch", "delta": 1.1, "epsilon_high": 0.05,
         "use_bias_correction_kl": True,
         "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 1.09},
    ),
    "dapo": (
        "dapo",
        {"clip_low": 0.05, "clip_high": 0.08, "kl": "k3", "kl_weight": 0.2},
        {"loss_type": "dapo", "epsilon": 0.05, "epsilon_high": 0.08, "beta": 0.2, "use_bias_correction_kl": False},
    ),
    "dapo-entropy": (
        "dapo",
        {"entropy": 0.1, "correction": {"weight": "token", "low": 0.95, "high": 1.03}},
        {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.1,
         "vllm_importance_sampling_mode": "token_truncate",
         "vllm_importance_sampling_clip_min": 0.95, "vllm_importance_sampling_clip_max": 1.03},
    ),
    "dapo-two-judges": (
        "dapo",
        {"rewards": "normalize_then_sum",
         "correction": {"weight": "token", "low": 0.97, "high": 1.07, "action": "zero"}},
        {"loss_type": "dapo", "epsilon_high": 0.28, "multi_objective_aggregation": "normalize_then_sum",
         "vllm_importance_sampling_mode": "token_mask",
         "vllm_importance_sampling_clip_min": 0.97, "vllm_importance_sampling_clip_max": 1.07},
    ),
    "dr-grpo": (
        "dr-grpo",
        {"constant": LONGEST, "correction": {"weight": "sequence", "low": 0.93, "high": 1.05}},
        {"loss_type": "dr_grpo", "scale_rewards": "none", "vllm_importance_sampling_mode": "sequence_truncate",
         "vllm_importance_sampling_clip_min": 0.93, "vllm_importance_sampling_clip_max": 1.05},
    ),
    "gspo": (
        "gspo",
        {"clip_low": 0.004, "clip_high": 0.006},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.004, "epsilon_high": 0.006},
    ),
    "luspo": (
        "luspo",
        {"clip_low": 0.004, "clip_high": 0.006},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.004, "epsilon_high": 0.006},
    ),
    "cispo": ("cispo", {"clip_high": 0.03}, {"loss_type": "cispo", "epsilon_high": 1.03}),
    "sapo": ("sapo", {}, {"loss_type": "sapo"}),
    "vespo": ("vespo", {"correction": {"weight": "token", "high": 1.06}},
              {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate",
               "vllm_importance_sampling_clip_max": 1.06}),
    "off-policy": ("grpo", {"off_policy": 0.01}, {"loss_type": "grpo", "off_policy_mask_threshold": 0.01}),
    "rloo": ("rloo", {"clip_high": 0.1}, {"beta": 0.05, "epsilon_high": 0.1}),
    "rloo-whitened": (
        "rloo",
        {"whiten": True, "kl_weight": 0.0, "kl": "none"},
        {"beta": 0.0, "normalize_advantages": True},
    ),
}  # fmt: skip


def judge(number: int) -> Any:
    """A reward function that returns what is written down."""

    def reward(completions: list[Any], **_: Any) -> list[float | None]:
        return REWARDS[number]

    reward.__name__ = f"judge{number}"
    return reward


def moved(model: Any, folder: Path, seed: int, share: float) -> None:
    """Add ``share`` of the values of another seed to the values of a model."""
    from transformers import AutoModelForCausalLM

    path = folder / f"add{seed}"
    if not path.exists():
        save_model(path, seed)
    other = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    with torch.no_grad():
        for mine, more in zip(model.parameters(), other.parameters(), strict=True):
            mine.add_(share * more)


def record() -> dict[str, Any]:
    """What both sides need of the answers, and losses with advantages and norms of all parameters' gradients."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        policy = save_model(folder / "policy", 1)
        tokenizer = AutoTokenizer.from_pretrained(policy)
        common = {
            "output_dir": work, "report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
            "per_device_train_batch_size": len(ANSWERS), "num_generations": GROUP, "max_completion_length": LONGEST,
            "reward_weights": WEIGHTS, "gradient_accumulation_steps": 1, "num_iterations": 1,
        }  # fmt: skip
        rows = [{"prompt": f"prompt {i // GROUP}"} for i in range(len(ANSWERS))]
        for name, (method, _, settings) in CASES.items():
            model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64)
            trainers = {"rloo": (RLOOTrainer, RLOOConfig)}
            trainer_class, config = trainers.get(method, (GRPOTrainer, GRPOConfig))
            args = config(**common | settings)
            if trainer_class is GRPOTrainer and settings.get("loss_type") == "cispo":
                args.epsilon_high = settings["epsilon_high"]
            trainer = trainer_class(
                model=model, reward_funcs=[judge(0), judge(1)], args=args, processing_class=tokenizer,
                train_dataset=Dataset.from_list(rows),
            )  # fmt: skip
            if trainer.ref_model is not None:
                trainer.ref_model.to(torch.float64)
                moved(trainer.ref_model, folder, 2, AWAY)
            prompts = [PROMPTS[i // GROUP] for i in range(len(ANSWERS))]
            # a sampler whose log-probabilities differ a little from token to token
            sampled = [[0.0] * len(answer) for answer in ANSWERS]
            corrects = trainer_class is GRPOTrainer
            if corrects:
                trainer.use_vllm = True
                trainer.vllm_importance_sampling_correction = True
                probe = log_probabilities(model, prompts)
                sampled = [
                    [x + 0.05 * ((7 * i + 3 * j) % 5 - 2) for j, x in enumerate(row)]
                    for i, row in enumerate(probe)
                ]
                if "vllm_importance_sampling_mode" not in settings:
                    trainer.vllm_importance_sampling_mode = "token_truncate"
                    trainer.vllm_importance_sampling_clip_max = 1e9
                    sampled = probe if "off_policy" not in name else sampled
            texts = tokenizer.batch_decode(ANSWERS)
            given = (prompts, ANSWERS, texts)
            if corrects:
                given = (prompts, ANSWERS, None, texts, sampled, {}, None, None)
            trainer._generate = lambda _, given=given: given
            trainer.model.train()
            trainer.current_gradient_accumulation_steps = 1
            batch = trainer._generate_and_score_completions(rows)
            if name == "off-policy":
                batch["importance_sampling_ratio"] = torch.ones_like(
                    batch["importance_sampling_ratio"]
                )
            moved(trainer.model, folder, 3, MOVED)
            loss = trainer.compute_loss(trainer.model, batch)
            loss.backward()
            results[name] = {
                "loss": loss.item(),
                "advantages": batch["advantages"].tolist(),
                "sampled": sampled,
                "norms": {
                    key: p.grad.norm().item()
                    for key, p in trainer.model.named_parameters()
                    if p.grad is not None
                },
                "products": products(trainer.model, folder),
            }
    return results


def products(model: Any, folder: Path) -> dict[str, float]:
    """The scalar product of each parameter's gradient with the values of a model of another seed."""
    from transformers import AutoModelForCausalLM

    path = folder / "direction"
    if not path.exists():
        save_model(path, DIRECTION)
    other = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    directions = dict(other.named_parameters())
    return {
        key: (p.grad * directions[key]).sum().item()
        for key, p in model.named_parameters()
        if p.grad is not None
    }


def log_probabilities(model: Any, prompts: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of the answers under a model, each text alone."""
    rows = []
    for prompt, answer in zip(prompts, ANSWERS, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]  # fmt: skip
        scores = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])
        rows.append(scores[:, 0].tolist())
    return rows


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(record(), indent=1) + "\n")
