"""The section ``[roles]``: who writes answers in reinforcement learning, who predicts rewards, where and how."""

from typing import Any, Literal

from pydantic import Field, NonNegativeInt

from weft.layout.layout import Layout
from weft.recipe.host_section import section_of
from weft.recipe.optimizer import Optimizer
from weft.section import Section, validated

#: Devices of processes, as a pattern; "" leaves the choice to the process.
DEVICES = r"^$|^cpu$|^cuda(:\d{1,3})?$"

#: Settings of ``[optimizer]`` that change how a whole step of the policy is taken, with their values for a critic.
OF_THE_POLICY = {
    "estimate": "backward",
    "pairs": False,
    "in_backward": False,
    "post_validation": False,
    "ema": 0.0,
    "use_ema": False,
    "groups": (),
}


class RolloutRole(Section):
    """Section on the processes that write answers in reinforcement learning: their number, layout and place."""

    layout: Layout = Field(
        Layout(),
        description=(
            "Layout of the model while it writes answers on the ranks that train: a table with settings of "
            "[layout], such as { tp = 2 }. If not set: every rank holds a whole model and writes answers by itself."
        ),
    )
    ranks: NonNegativeInt = Field(
        0,
        description=(
            "Number of additional processes that only write answers, while the ranks train. 0: the ranks train and "
            "write in turn, unless engines of other hosts write (see 'listen')."
        ),
    )
    listen: str = Field(
        "",
        pattern=r"^$|^[^/\s]+:\d{1,5}$",
        description=(
            "Address HOST:PORT at which the first rank waits for engines, processes on other hosts that write "
            "answers. One is started there by 'weft engine --checkpoint policy: --join HOST:PORT', where "
            "'policy:' stands for the weights in training. It needs the same WEFT_SECRET in its environment as "
            "the run. Empty: no other hosts."
        ),
    )
    device: str = Field(
        "",
        pattern=DEVICES,
        description=(
            "Device on which processes that only write answers compute: 'cpu', 'cuda' (the GPUs in turn), or 'cuda:N' "
            "(the GPU with number N). Empty: the GPUs in turn that no rank of training uses, if there are such; else "
            "all GPUs in turn, or the CPU without any."
        ),
    )
    threads: NonNegativeInt = Field(
        0,
        description=(
            "Number of CPU threads of each process that only writes answers. 0: an equal share of the cores."
        ),
    )
    weights: Literal["", "float", "bfloat16"] = Field(
        "",
        description=(
            "Number format of the weights and keys with which answers are written. 'bfloat16' writes faster from a "
            "copy of the weights in two bytes each, for dense models that are whole on every rank that writes; "
            "'float': as weights are kept in training, which a rank that has all of them does not copy. Empty: "
            "'bfloat16' where GPUs write and train in bfloat16 and all layers have softmax attention; else 'float'."
        ),
    )
    delta: bool = Field(
        False,
        description=(
            "Whether processes that write answers are sent only the elements of the weights that have changed, "
            "where these are fewer bytes. The weights arrive exactly, but the ranks that train keep one more copy "
            "of them."
        ),
    )
    invariant: bool = Field(
        False,
        description=(
            "Whether generation computes exactly the same log-probabilities as training, to the last bit. This "
            "makes both slower. It needs a model without experts that is whole on every rank, on CPUs, and "
            "answers that are written by the ranks that train."
        ),
    )

    @property
    def elsewhere(self) -> bool:
        """Whether processes other than the training ranks write the answers."""
        return bool(self.ranks or self.listen)

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port at which engines of other hosts join; None if they do not."""
        host, _, port = self.listen.rpartition(":")
        return (host.strip("[]"), int(port)) if self.listen else None


class ReferenceRole(Section):
    """Section on the reference model of reinforcement learning, from which the policy is to stay near: which it is, and
    where it computes.
    """

    ranks: NonNegativeInt = Field(
        0,
        description=(
            "Number of additional processes that hold the reference model and compute its log-probabilities, while "
            "the ranks that train compute their own; roles.placement says where. 0: the ranks that train keep the "
            "reference model beside the policy, and compute with both in turn."
        ),
    )
    layout: Layout = Field(
        Layout(),
        description=(
            "Layout of the reference model: a table with settings of [layout], such as { tp = 2 }. With ranks = 0 it "
            "is one over the ranks that train, which then keep the reference model under another layout than the "
            "policy. If not set: as the policy's, and of processes each holds a whole model and computes a part of "
            "the answers."
        ),
    )
    model: str = Field(
        "",
        description=(
            "For ranks above 0: the reference model, in any form that model.from takes. It may have other sizes than "
            "the policy, but needs the same tokenizer. Empty: the model with which the run starts."
        ),
    )
    device: str = Field(
        "cpu",
        pattern=DEVICES.removeprefix("^$|"),
        description=(
            "Device on which these processes compute: 'cpu', 'cuda' (one GPU for each), or 'cuda:N' (the GPU with "
            "number N)."
        ),
    )
    threads: NonNegativeInt = Field(
        0,
        description="Number of CPU threads of each of these processes. 0: an equal share of the cores.",
    )

    @property
    def elsewhere(self) -> bool:
        """Whether the reference model is in processes of its own."""
        return self.ranks > 0

    @property
    def has_own_layout(self) -> bool:
        """Whether the ranks that train keep the reference model under a layout of its own."""
        return not self.ranks and self.layout != Layout()

    @property
    def process_layout(self) -> Layout:
        """Layout of the reference model over its processes."""
        return self.layout if self.layout.world > 1 else Layout(dp=max(1, self.ranks))


class RewardRole(Section):
    """Section on reward models that score answers (tasks.reward = 'reward-model'): where they compute."""

    ranks: int = Field(
        0,
        ge=0,
        le=1,
        description=(
            "Number of additional processes on the first rank's host for each reward model. 1: a server ('weft "
            "serve') holds the model, and all processes that score answers ask it; 0: each of these processes loads "
            "the model. For a server on another host, tasks.model is its address."
        ),
    )
    device: str = Field(
        "cpu",
        pattern=DEVICES.removeprefix("^$|"),
        description=(
            "Device on which these servers compute: 'cpu', 'cuda', or 'cuda:N' (the GPU with number N)."
        ),
    )
    threads: NonNegativeInt = Field(
        0, description="Number of CPU threads of each of these servers. 0: all cores."
    )


class CriticRole(Section):
    """Section on the critic of rl.method = 'ppo', which predicts the rewards that follow a token."""

    trunk: Literal["shared", "own"] = Field(
        "shared",
        description=(
            "Whether the critic computes with the layers of the policy. 'shared': it is a second output of the "
            "policy; 'own': it is a model of its own, with gradients and an optimizer of its own, on the ranks that "
            "train, under the same layout. This takes as much memory again (see 'ranks')."
        ),
    )
    ranks: NonNegativeInt = Field(
        0,
        description=(
            "For trunk = 'own': number of additional processes that hold the critic and train it, while the ranks "
            "that train the policy compute; roles.placement says where. 0: the ranks that train keep the critic "
            "beside the policy, and train both in turn."
        ),
    )
    layout: Layout = Field(
        Layout(),
        description=(
            "For ranks above 0: layout of the critic over these processes, a table with settings of [layout], such as "
            "{ tp = 2 }. If not set: each process holds a whole model and learns from a part of the answers."
        ),
    )
    device: str = Field(
        "cpu",
        pattern=DEVICES.removeprefix("^$|"),
        description=(
            "Device on which these processes compute: 'cpu', 'cuda' (one GPU for each), or 'cuda:N' (the GPU with "
            "number N)."
        ),
    )
    threads: NonNegativeInt = Field(
        0,
        description="Number of CPU threads of each of these processes. 0: an equal share of the cores.",
    )
    model: str = Field(
        "",
        description=(
            "For trunk = 'own': the model whose weights the critic begins with, in any form that model.from "
            "takes, such as the folder of a reward model. It may have other sizes than the policy, but needs the "
            "same tokenizer. Empty: the critic begins with the layers that the policy has when rewards begin."
        ),
    )
    optimizer: dict[str, Any] = Field(
        {},
        description=(
            "For trunk = 'own': settings of [optimizer] that are different for the critic, such as { lr = 1e-5 }. "
            "Empty: the critic is trained as the policy is."
        ),
    )

    @property
    def is_apart(self) -> bool:
        """Whether the critic is a model of its own, beside the policy."""
        return self.trunk == "own"

    @property
    def elsewhere(self) -> bool:
        """Whether the critic is in processes of its own."""
        return self.ranks > 0

    @property
    def process_layout(self) -> Layout:
        """Layout of the critic over its processes."""
        return self.layout if self.layout.world > 1 else Layout(dp=max(1, self.ranks))

    def optimizer_settings(self, common: Optimizer) -> Optimizer:
        """Return the settings of the critic's optimizer. ``common``: the section ``[optimizer]`` of the recipe.

        Raises :class:`UsageError` for an unknown setting or a wrong value.
        """
        values = common.model_dump() | OF_THE_POLICY | self.optimizer
        named = {name: values[name] for name in Optimizer.hosts}
        validated(
            Optimizer.with_settings(named),
            named | self.optimizer,
            "roles.critic.optimizer",
        )
        settings: Optimizer = section_of(Optimizer, values)
        return settings


class Roles(Section):
    """Section on the roles of reinforcement learning: which ranks do what, and how."""

    placement: Literal["local", "ray"] = Field(
        "local",
        description=(
            "Where the processes of roles.rollout.ranks, roles.reference.ranks and roles.critic.ranks are started. "
            "'local': on the first rank's host; 'ray': where Ray finds room for them, on the cluster of RAY_ADDRESS, "
            "or on this host without it. Weights, answers and numbers of tokens never go through Ray."
        ),
    )
    rollout: RolloutRole = Field(
        RolloutRole(),
        description="The processes that write answers, and how they divide the model.",
    )
    reference: ReferenceRole = Field(
        ReferenceRole(),
        description="The reference model of losses with rl.loss.kl: which it is, and where it computes.",
    )
    reward: RewardRole = Field(
        RewardRole(),
        description="Reward models that score answers: where they compute.",
    )
    critic: CriticRole = Field(
        CriticRole(),
        description="The critic of rl.method = 'ppo': whether it has layers of its own, and how it is trained.",
    )
