"""Preference losses as TRL computes them, on a small model that both sides can make: recorded in ``trl_losses.json``.

Made with TRL 1.16.0 by ``python tests/train/trl_peer.py``, where that, datasets and accelerate are installed.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tokenizers
import torch

from weft.data.order import hash_keys
from weft.layout.dims import Box, Logical
from weft.layout.mesh import Mesh
from weft.models.hugging_face import export
from weft.models.transformer import Transformer
from weft.recipe import ModelShape

RECORDED = Path(__file__).with_name("trl_losses.json")
TOKENS = ["<pad>", "<eos>", "<user>", "<assistant>", *" abcdefghijklmnopqrstuvwxyz?."]
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<eos>' }}{% endfor %}"
)
TEMPLATE += "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
SHAPE = ModelShape(
    vocab=len(TOKENS), layers=2, embed=16, heads=4, kv_heads=2, ffn=24, norm_eps=1e-6
)

ROWS = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected, "margin": margin}
    for prompt, chosen, rejected, margin in (
        ("what is it?", "it is a loom.", "no.", 0.5),
        (
            "why?",
            "because threads cross.",
            "because it is so and was so and will be so.",
            0.0,
        ),
        ("say a", "a", "b", 1.25),
        (
            "how many threads?",
            "ten thousand.",
            "i do not know how many there are.",
            -0.25,
        ),
    )
]

#: What Weft calls each loss, and the settings of TRL's trainer for it.
DPO: dict[str, dict[str, Any]] = {
    "dpo": {"loss_type": ["sigmoid"], "beta": 0.1},
    "ipo": {"loss_type": ["ipo"], "beta": 0.3},
    "robust": {"loss_type": ["robust"], "beta": 0.2, "label_smoothing": 0.15},
    "dpo-norm": {"loss_type": ["sigmoid_norm"], "beta": 2.0},
    "hinge": {"loss_type": ["hinge"], "beta": 0.5},
}
#: TRL's CPO trainer has the formulas of conservative DPO, for differences to a reference, and of SimPO, for averages.
CPO: dict[str, dict[str, Any]] = {
    "conservative": {"loss_type": "sigmoid", "beta": 0.4, "label_smoothing": 0.1},
    "simpo": {
        "loss_type": "simpo",
        "beta": 2.0,
        "simpo_gamma": 0.7,
        "label_smoothing": 0.0,
    },
}


def values(seed: int) -> Any:
    """Values of a part of a parameter, the same in every version of everything: scales about 1, weights about 0."""

    def of(name: str, logical: Logical, box: Box) -> torch.Tensor:
        bits = hash_keys(zlib.crc32(name.encode()), seed, np.arange(logical.numel))
        drawn = torch.from_numpy(
            (bits >> np.uint64(11)).astype(np.float64) / 2**53 - 0.5
        ).view(logical.shape)
        whole = 1 + 0.2 * drawn if logical.std is None else drawn
        return whole[tuple(slice(lo, hi) for lo, hi in box)]

    return of


def save_model(folder: Path, seed: int, shape: ModelShape = SHAPE) -> Path:
    """A model of ``seed`` with its tokenizer of single letters, as transformers reads it."""
    model = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {token: i for i, token in enumerate(TOKENS)}, "<pad>"
        )
    )
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    model.decoder = tokenizers.decoders.Fuse()
    model.add_special_tokens(TOKENS[:4])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
    }
    ids = {"pad_token_id": 0, "eos_token_id": 1}
    files = {
        "tokenizer.json": model.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "chat_template.jinja": TEMPLATE.encode(),
        "generation_config.json": json.dumps(ids).encode(),
    }
    logical = dict(Transformer(shape, Mesh.single()).logical_parameters())
    of = values(seed)
    whole = {
        name: of(name, one, tuple((0, n) for n in one.shape))
        for name, one in logical.items()
    }
    export(whole, shape, folder, files=files)
    return folder


def messages() -> list[dict[str, Any]]:
    """The rows with messages, as TRL applies the chat template to them."""
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "chosen": [{"role": "assistant", "content": row["chosen"]}],
            "rejected": [{"role": "assistant", "content": row["rejected"]}],
        }
        for row in ROWS
    ]


def record() -> dict[str, Any]:
    """The token ids of the rows, what is learned of them, and losses with norms of all parameters' gradients."""
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
    from trl.experimental.cpo import CPOTrainer

    found: dict[str, Any] = {"losses": {}}
    with tempfile.TemporaryDirectory() as work:
        policy, reference = (save_model(Path(work, str(seed)), seed) for seed in (1, 2))
        scorer = save_model(
            Path(work, "score"), 1, SHAPE.model_copy(update={"output": "score"})
        )
        tokenizer = AutoTokenizer.from_pretrained(policy)
        common = {
            "output_dir": work,
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
        }

        def gradients(model: Any, loss: torch.Tensor) -> dict[str, float]:
            loss.backward()
            norms = {
                name: p.grad.norm().item()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
            model.zero_grad()
            return norms

        for name, settings in DPO.items():
            models = [
                AutoModelForCausalLM.from_pretrained(at, dtype=torch.float64)
                for at in (policy, reference)
            ]
            trainer = DPOTrainer(
                models[0], models[1], DPOConfig(**common, **settings, max_length=None), processing_class=tokenizer,
                train_dataset=Dataset.from_list(messages()),
            )  # fmt: skip
            batch = trainer.data_collator(
                [trainer.train_dataset[i] for i in range(len(ROWS))]
            )
            loss = trainer._compute_loss(trainer.model, batch, False)
            found["losses"][name] = settings | {
                "loss": loss.item(),
                "norms": gradients(trainer.model, loss),
            }
        found["ids"], found["learned"] = (
            batch["input_ids"].tolist(),
            batch["completion_mask"].tolist(),
        )
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
        inputs = {
            "input_ids": batch["input_ids"],
            "attention_mask": batch["attention_mask"],
        }
        for name, settings in CPO.items():
            models = [
                AutoModelForCausalLM.from_pretrained(at, dtype=torch.float64)
                for at in (policy, reference)
            ]
            values = []
            for model in models:
                logits = model(**inputs).logits[:, :-1].log_softmax(-1)
                learned = labels[:, 1:] >= 0
                taken = (
                    logits.gather(2, labels[:, 1:, None].clamp(min=0))[..., 0] * learned
                )
                values.append(taken.sum(1) / (learned.sum(1) if name == "simpo" else 1))
            compared = values[0] - (0 if name == "simpo" else values[1].detach())
            trainer = SimpleNamespace(
                **settings, alpha=0.0, accelerator=SimpleNamespace(device="cpu")
            )
            loss = CPOTrainer.cpo_loss(trainer, *compared.chunk(2))[0].mean()
            found["losses"][name] = settings | {
                "loss": loss.item(),
                "norms": gradients(models[0], loss),
            }
        model = AutoModelForSequenceClassification.from_pretrained(
            scorer, dtype=torch.float64
        )
        rows = [
            row | {"margin": given["margin"]}
            for row, given in zip(messages(), ROWS, strict=True)
        ]
        for name, data in (("reward", messages()), ("reward with margin", rows)):
            trainer = RewardTrainer(
                model, RewardConfig(**common, max_length=None), processing_class=tokenizer,
                train_dataset=Dataset.from_list(data),
            )  # fmt: skip
            batch = trainer.data_collator(
                [trainer.train_dataset[i] for i in range(len(ROWS))]
            )
            loss = trainer.compute_loss(trainer.model, batch)
            found["losses"][name] = {
                "loss": loss.item(),
                "norms": gradients(trainer.model, loss),
            }
    return found


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(record(), indent=1) + "\n")
