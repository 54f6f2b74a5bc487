"""Advantages and losses as verl computes them, on made-up numbers of answers of unequal length: ``verl_losses.json``.

Made with verl 0.9.1 by ``python tests/rl/record_verl.py FOLDER``, where FOLDER has its unpacked wheel, and PyTorch,
omegaconf and tensordict are installed. verl's own functions are called; the packages around them, which need Ray, are
empty here. One answer has a span in its middle that the policy has not written, such as a tool's.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.data.order import hash_keys

RECORDED = Path(__file__).with_name("verl_losses.json")
LENGTHS, LONGEST = [3, 9, 1, 12, 6], 12
#: Tokens of the fourth answer that it did not write.
OBSERVED = (3, range(4, 7))
SCORES = [1.0, -0.5, 0.25, 2.0, 0.0]
DISCOUNT, TRACE, KL = 0.98, 0.9, 0.1
#: verl's names of normalisers, and Weft's.
MODES = {
    "token-mean": "tokens",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum-norm": "constant",
}


def mask() -> np.ndarray:
    """Which tokens the policy has written, bool ``[answers, LONGEST]``."""
    written = np.arange(LONGEST) < np.array(LENGTHS)[:, None]
    written[OBSERVED[0], list(OBSERVED[1])] = False
    return written


def numbers() -> dict[str, np.ndarray]:
    """Log-probabilities and values, float64 ``[answers, LONGEST]`` each."""
    shape = len(LENGTHS), LONGEST

    def drawn(column: int) -> np.ndarray:
        keys = hash_keys(column, np.arange(shape[0] * shape[1]))
        return (keys / 2.0**64).reshape(shape) - 0.5

    old = 2 * drawn(0) - 3
    return {
        "old": old,
        "new": old + 0.8 * drawn(1),
        "reference": old + drawn(2),
        "sampler": old + 0.3 * drawn(3),
        "values": drawn(4),
        "new_values": drawn(4) + 0.6 * drawn(5),
    }


def core_algorithms(folder: str) -> Any:
    """verl's module of losses, without what else is in its packages."""
    for name in ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.workers"):  # fmt: skip
        module: Any = types.ModuleType(name)
        module.__path__ = [str(Path(folder, *name.split(".")))]
        module.as_torch_index = module.group_mean_std = None
        sys.modules[name] = module
    for name, cls in (("trainer", "AlgoConfig"), ("workers", "ActorConfig")):
        config: Any = types.ModuleType(f"verl.{name}.config")
        setattr(config, cls, type(cls, (), {}))
        sys.modules[config.__name__] = config
    from verl.trainer.ppo import core_algos

    return core_algos


def record(folder: str) -> dict[str, Any]:
    """Advantages and returns, and losses with their derivatives by every token's log-probability or value."""
    verl = core_algorithms(folder)
    given = {name: torch.from_numpy(x) for name, x in numbers().items()}
    written = torch.from_numpy(mask()).double()
    kl = verl.kl_penalty(given["old"], given["reference"], "k1")
    rewards = -KL * kl * written
    ends = torch.tensor(LENGTHS) - 1
    rewards[torch.arange(len(LENGTHS)), ends] += torch.tensor(
        SCORES, dtype=torch.float64
    )
    advantages, returns = verl.compute_gae_advantage_return(
        rewards, given["values"], written, DISCOUNT, TRACE
    )
    config = types.SimpleNamespace(gamma=DISCOUNT)
    of_returns, _ = verl.compute_reinforce_plus_plus_outcome_advantage(
        rewards, written, config
    )
    result: dict[str, Any] = {
        "gae": advantages.tolist(),
        "returns": returns.tolist(),
        "reinforce-plus-plus": of_returns.tolist(),
    }

    class Config(verl.ActorConfig):  # type: ignore[misc]
        clip_ratio, clip_ratio_low, clip_ratio_high = 0.2, 0.1, 0.15
        global_batch_info: dict[str, Any] = {}  # noqa: RUF012

        def get(self, name: str, default: float) -> float:
            return 1.2

    weights = (given["old"] - given["sampler"]).exp().clamp(max=1.05)
    for mode in MODES:
        new = given["new"].clone().requires_grad_()
        loss, _ = verl.compute_policy_loss_vanilla(
            given["old"], new, advantages, written, mode, Config(), weights
        )
        loss.backward()
        result[mode] = {"loss": loss.item(), "slopes": new.grad.tolist()}
        values = given["new_values"].clone().requires_grad_()
        loss, _ = verl.compute_value_loss(
            values, returns, given["values"], written, 0.1, mode
        )
        loss.backward()
        result[mode] |= {"value_loss": loss.item(), "value_slopes": values.grad.tolist()}  # fmt: skip
    return result


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(record(sys.argv[1]), indent=1) + "\n")
