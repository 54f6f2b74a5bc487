"""The recipe: all sections of a run, and what holds between them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, SerializeAsAny, model_validator

from weft.errors import UsageError
from weft.layout.axes import BATCH_AXES
from weft.layout.layout import Layout
from weft.plugins import check_model_plugin, check_plugin, load_plugins_of
from weft.recipe.adapter import Adapter
from weft.recipe.checkpoint_section import Checkpoint
from weft.recipe.conflicts import AskedRecipe, refuse_conflicts
from weft.recipe.data_section import ANSWER_PAIRS, Data
from weft.recipe.generate_section import Generate
from weft.recipe.host_section import with_techniques
from weft.recipe.loss_section import Loss
from weft.recipe.memory_section import Memory
from weft.recipe.model_shape import ModelShape
from weft.recipe.named_section import section_elsewhere
from weft.recipe.observe import Observe
from weft.recipe.optimizer import Optimizer
from weft.recipe.resilience import Resilience
from weft.recipe.sync import Sync
from weft.recipe.train_section import Train
from weft.recipe.validation_section import Task, Validation
from weft.registry import find
from weft.section import Section

if TYPE_CHECKING:
    from weft.recipe.control_section import Control
    from weft.recipe.federated_section import Federated
    from weft.recipe.rl_section import Reinforcement
    from weft.recipe.roles_section import Roles
    from weft.recipe.saddle_section import Saddle
    from weft.recipe.stream_section import SampleStream
else:
    Control = section_elsewhere("control_section", "Control")
    Federated = section_elsewhere("federated_section", "Federated")
    Reinforcement = section_elsewhere("rl_section", "Reinforcement")
    Roles = section_elsewhere("roles_section", "Roles")
    Saddle = section_elsewhere("saddle_section", "Saddle")
    SampleStream = section_elsewhere("stream_section", "SampleStream")

#: Where runs go, each in a folder of its own.
RUNS = Path("runs")


class Use(Section):
    """A plugin's callback or phase: its ``name``, and the ``settings`` with which it is called.

    In a recipe a plain text stands for a name without settings.
    """

    name: str = Field(
        description="Name under which a plugin's Python code has registered the callback or phase."
    )
    settings: dict[str, Any] = Field(
        {},
        description=(
            "Keyword arguments for the plugin that 'name' chooses, such as { rate = 0.1 }. Empty: the plugin's own "
            "defaults."
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given


class Recipe(Section):
    """All settings of one run, in sections; :func:`weft.recipe.read.load_recipe` reads them from a TOML file."""

    name: str = Field(
        "run", description="Name of the run, and of its folder: runs/NAME."
    )
    plugins: tuple[str, ...] = Field(
        (),
        description=(
            "Python modules of your own, imported before the recipe is checked. They register"
            " losses, models and other techniques that the recipe then names "
            "(docs/reference/extension-kinds.md)."
        ),
    )
    callbacks: tuple[Use, ...] = Field(
        (),
        description=(
            "Plugins of your own that are called before, during and after the run, for example to report its "
            "progress. Each is a name, or a table { name = ..., settings = {...} }. If a callback fails, the run "
            "ends with an error."
        ),
    )
    phases: tuple[Use, ...] = Field(
        (),
        description=(
            "Plugins of your own that replace a part (phase) of every training step, such as the update of the "
            "parameters (docs/reference/extension-kinds.md). Each is a name, or a table { name = ..., settings = "
            "{...} }."
        ),
    )
    model: ModelShape = Field(
        ModelShape(),
        description=(
            "The model that is trained: a pretrained model to start from, or the sizes of a new transformer."
        ),
    )
    adapter: Adapter | None = Field(
        None,
        description=(
            "Train a low-rank adapter (LoRA) beside the frozen weights of the model, instead of these weights."
        ),
    )
    data: Annotated[SerializeAsAny[Data], with_techniques(Data)] = Field(
        Data(),
        description="What the model learns from: data sources, how they are mixed, and how they become tokens.",
    )
    layout: Layout = Field(
        Layout(),
        description=(
            "How the ranks divide model, data and work: the number of ranks along each axis (dp, shard, cp, tp, pp, "
            "ep, island), and how ranks along an axis work together."
        ),
    )
    train: Train = Field(
        Train(),
        description="Length of the run, batch size, number format, device and recomputation.",
    )
    memory: Memory = Field(
        Memory(),
        description=(
            "Where weights, gradients, optimizer state and activations are kept while they are not in use, to train "
            "models that the device's memory cannot hold."
        ),
    )
    loss: Annotated[SerializeAsAny[Loss], with_techniques(Loss)] = Field(
        Loss(),
        description="The loss that training minimises, and the models that it compares with.",
    )
    optimizer: Annotated[SerializeAsAny[Optimizer], with_techniques(Optimizer)] = Field(
        Optimizer(),
        description="The update rule, the learning rate over the run, and the clipping of gradients.",
    )
    validation: Validation = Field(
        Validation(),
        description="How often and on how much held-out data the loss is measured, and what follows from it.",
    )
    tasks: tuple[Annotated[SerializeAsAny[Task], with_techniques(Task)], ...] = Field(
        (),
        description=(
            "Questions that the model answers during the run. Without a reward they only measure the model; with "
            "one, a run with [rl] learns from the rewards of the answers."
        ),
    )
    rl: Reinforcement | None = Field(
        None,
        description=(
            "Reinforcement learning of a language model, which learns from the rewards of answers that it writes "
            "itself. The rewards are those of [[tasks]]."
        ),
    )
    roles: Roles | None = Field(
        None,
        description="For runs with [rl]: which processes write the answers and do other parts of the work, and how.",
    )
    stream: SampleStream | None = Field(
        None,
        description=(
            "Learn from samples that simulators send while they run, instead of training a language model. The "
            "model is set in [model] by kind, inputs and outputs."
        ),
    )
    checkpoint: Checkpoint = Field(
        Checkpoint(),
        description="Where and how often checkpoints are saved, and what is exported at the end of the run.",
    )
    observe: Observe = Field(
        Observe(),
        description="Which metrics are recorded, how often, and where they are sent.",
    )
    resilience: Annotated[SerializeAsAny[Resilience], with_techniques(Resilience)] = (
        Field(
            Resilience(),
            description="What a run of several ranks does when a rank dies, stalls, slows down or sends wrong values.",
        )
    )
    sync: Annotated[SerializeAsAny[Sync], with_techniques(Sync)] = Field(
        Sync(),
        description=(
            "How islands (layout.island), groups of ranks that train apart from each other, combine what they have "
            "learned."
        ),
    )
    generate: Generate | None = Field(
        None,
        description="Sample texts that the model writes at the end of the run, and perhaps before it.",
    )
    control: Control | None = Field(
        None,
        description=(
            "Reinforcement learning of a small network, which learns to act in environments, instead of training a "
            "language model."
        ),
    )
    federated: Federated | None = Field(
        None,
        description=(
            "Federated training: clients train the model on data of their own, and a server combines their updates. "
            "Clients are other processes, or they are simulated in one process with simulated time."
        ),
    )
    saddle: Saddle | None = Field(
        None,
        description=(
            "Find a saddle point, where some parameters minimise and others maximise an objective that is divided "
            "over devices, instead of training a language model."
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _plug(cls, tree: Any) -> Any:
        """Import the plugins first: sections name what they register."""
        if isinstance(tree, dict):
            load_plugins_of(tree)
        return tree

    @model_validator(mode="after")
    def _plugged(self) -> Self:
        """Look for all that plugins are to offer."""
        for use in self.callbacks:
            check_plugin("callback", use.name, use.settings)
        for use in self.phases:
            check_plugin("phases", use.name, use.settings)
            if find("phases", use.name).module.startswith("weft."):
                raise ValueError(
                    f"phases = {use.name!r} is Weft's own, which other settings ask for; leave it out"
                )
        for name in self.observe.trackers:
            check_plugin("tracker", name)
        check_plugin("loss", self.loss.kind, self.loss.settings)
        if self.loss.settings and not self.loss.is_own:
            raise ValueError(
                f"loss.settings are for a plugin's loss, and loss.kind = {self.loss.kind!r} is Weft's own"
            )
        if self.model.kind:
            check_model_plugin(self.model)
        for source in self.data.sources:
            check_plugin("dataset", source.kind, source.settings)
        for task in self.tasks:
            if any(task.named()):
                check_plugin("task", task.reward)
        return self

    @model_validator(mode="after")
    def _length(self) -> Self:
        """Return where ``data.epochs`` alone says how long the run is, it has no other limit."""
        if self.data.epochs and "steps" not in self.train.model_fields_set:
            train = self.train.model_copy(update={"steps": 0})
            # it was not given, and is not recorded as if it were
            train.model_fields_set.discard("steps")
            object.__setattr__(self, "train", train)
        if not (self.train.steps or self.data.epochs):
            raise ValueError(
                "train.steps = 0 is as many as data.epochs need, and these are 0; set one of the two"
            )
        return self

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.model.adapter is not None and self.model.origin is not None:
            raise ValueError(
                "model.adapter is that of model.from; a new one is the recipe's own: adapter = Adapter(...)"
            )
        refuse_conflicts(AskedRecipe(**dict(self)))
        self._check_loss()
        self._check_rewards()
        if self.control is not None:
            from weft.recipe.control_rules import check_beside_control

            check_beside_control(self)
        if self.saddle is not None:
            from weft.recipe.saddle_rules import check_beside_saddle

            check_beside_saddle(self)
        if self.federated is not None:
            from weft.recipe.federated_rules import check_beside_federated

            check_beside_federated(self)
        elif self.stream is not None or self.model.inputs:
            from weft.recipe.stream_rules import check_beside_stream

            check_beside_stream(self)
        return self

    def need_model(self) -> None:
        """Raise :class:`UsageError` if the recipe trains no language model, because it has ``[control]`` or
        ``[saddle]``.
        """
        if self.trains_no_language_model:
            section = "saddle" if self.control is None else "control"
            raise UsageError(
                f"this is about language models, and the recipe has [{section}]; weft train runs it"
            )

    @property
    def trains_no_language_model(self) -> bool:
        """Whether the run takes other steps than those of a language model, because it has ``[control]`` or
        ``[saddle]``.
        """
        return self.control is not None or self.saddle is not None

    @property
    def survives(self) -> bool:
        """Whether the run goes on with the remaining ranks when ranks are lost.

        That needs ``resilience.survive`` and several ranks. It is False for runs with islands, with ``[stream]``, or
        without a language model.
        """
        return (
            self.resilience.survive
            and self.layout.world > 1
            and self.layout.island == 1
            and not self.trains_no_language_model
            and self.stream is None
        )

    @property
    def islands_come_and_go(self) -> bool:
        """Whether the run goes on when islands are lost, and lets them come back.

        It does not if the sync method has no rounds, or if islands sum gradients or compute for each other in every
        step.
        """
        return (
            self.resilience.survive
            and self.layout.island > 1
            and not self.sync.of_gradients
            and self.sync.routes == "own"
            and self.sync.method.in_rounds
        )

    def recorded(self, given: bool = False) -> dict[str, Any]:
        """Return all settings as JSON values, as records and checkpoints keep them: without the secrets of
        addresses.

        ``given``: return the settings that the user has given alone, from which :func:`weft.recipe.read.build_recipe`
        builds this recipe again; nothing if addresses among them have secrets.
        """
        tree = self.model_dump(mode="json", exclude_unset=given)
        if "://" not in str(tree):
            return tree
        from weft.recipe.masked import has_secrets, masked_values

        if given:
            return {} if has_secrets(tree) else tree
        masked: dict[str, Any] = masked_values(tree)
        return masked

    def batch_layout(self, layout: Layout) -> Layout:
        """Return ``layout`` with ``dp`` set to the number of parts into which ranks divide a batch.

        With ``optimizer.pairs`` every two data parallel ranks get the same sequences, so that ``dp`` is halved.
        Otherwise the result is ``layout`` itself.
        """
        paired = self.optimizer.pairs and layout.dp > 1
        return layout.model_copy(update={"dp": layout.dp // 2}) if paired else layout

    def _check_loss(self) -> None:
        """Pairs of answers and a loss that compares them come together."""
        kind, pairs = (
            self.loss.kind,
            [source.kind in ANSWER_PAIRS for source in self.data.sources],
        )
        pair_loss = self.loss.pair_loss
        learns_judged = pair_loss is not None and pair_loss.judged
        others = [
            s.kind for s in self.data.sources if (s.kind == "feedback") != learns_judged
        ]
        if others and (learns_judged or "feedback" in others):
            other = others[0] if learns_judged else "feedback"
            raise ValueError(
                f"loss.kind = {kind!r} with data.kind = {other!r}: 'kto' learns from answers that "
                "are each good or bad, data.kind = 'feedback', and nothing else does"
            )
        if self.loss.of_pairs and not all(pairs):
            raise ValueError(
                f"loss.kind = {kind!r} compares pairs of answers; set data.kind = 'preference'"
            )
        if any(pairs) and not self.loss.of_pairs:
            raise ValueError(
                "data.kind = 'preference' has pairs of answers; set loss.kind = 'dpo' or the like"
            )
        if self.loss.reference is not None and (
            pair_loss is None or not pair_loss.has_reference
        ):
            raise ValueError(
                f"loss.reference, but loss.kind = {kind!r} has none; leave it out"
            )
        if self.loss.label_smoothing and (pair_loss is None or not pair_loss.smooths):
            raise ValueError(
                f"loss.label_smoothing does nothing for loss.kind = {kind!r}; leave it out"
            )
        if self.loss.margin and not (pair_loss and pair_loss.has_margin):
            raise ValueError(
                f"loss.margin does nothing for loss.kind = {kind!r}; leave it out"
            )
        if self.loss.scores and self.generate:
            raise ValueError(
                "loss.kind = 'reward' makes a model that scores texts and writes none; leave out [generate]"
            )
        if self.model.output == "score" and not self.loss.scores:
            raise ValueError(
                f"model.output = 'score' is trained by loss.kind = 'reward', not by {kind!r}"
            )

    def _check_rewards(self) -> None:
        """Rewards are for runs that learn from them."""
        rewards = [task.reward for task in self.tasks if task.reward]
        if self.rl is not None and not rewards:
            raise ValueError(
                "[rl] learns from rewards, and no [[tasks]] has one; set reward in one of them, such as reward = "
                "'addition'"
            )
        if self.rl is not None and self.loss.kind != "cross-entropy":
            raise ValueError(
                f"loss.kind = {self.loss.kind!r}, but the loss of [rl] is rl.method; leave [loss] out"
            )
        if self.rl is not None and self.data.sources != Data().sources:
            raise ValueError(
                "[data] names sources, and a run with [rl] reads none: it learns from answers to the questions of "
                '[[tasks]]; leave data.path and data.sources out, or name the file in a task: path = "prompts.jsonl"'
            )
        if rewards and self.rl is None:
            raise ValueError(
                f"tasks.reward = {rewards[0]!r} rewards answers, and nothing in this recipe learns from rewards; add "
                "[rl], or leave the task out"
            )

    def rows_per_pass(self, layout: Layout) -> tuple[int, int]:
        """Return ``(rows, passes)`` of a rank under ``layout``.

        ``rows``: sequences in each forward and backward pass. ``passes``: passes in each step, which accumulate
        gradients.
        """
        ranks = self.batch_layout(layout).size(*BATCH_AXES)
        per_rank = -(-self.train.batch // ranks)
        # A pipeline wants microbatches, about twice as many as it has ranks.
        rows = min(
            self.train.micro_batch
            or max(1, per_rank // (2 * layout.pp if layout.pp > 1 else 1)),
            per_rank,
        )
        return rows, -(-per_rank // rows)
