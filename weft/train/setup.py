"""From a recipe to a :class:`Job`: data, model and shape are looked up and checked before a rank starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch

from weft.data.loader import Corpus, Loader, open_data, shares_of, tokenizer_of_data
from weft.data.source_check import check_sources
from weft.data.tokenizer import NO_TOKENIZER
from weft.errors import UsageError, WeftError
from weft.layout.axes import BATCH_AXES, MODEL_AXES
from weft.layout.layout import Layout
from weft.layout.placement import Place
from weft.memory.heap import passing_by_the_heap
from weft.models.hooks import Hooks
from weft.parallel.build import Built, check_fits, parallelize
from weft.registry import find
from weft.shapes.carried_files import context_length, files_of_run
from weft.shapes.parameters import learns, parameter_count, parameters
from weft.train.rule_optimizer import RuleOptimizer, learning_rate, slot_bytes

# a recipe without model.from does not wait for what reads checkpoints
if TYPE_CHECKING:
    from weft.checkpoint.run_state import Progress
    from weft.checkpoint.weights import Pretrained
    from weft.data.order import Order, RowList
    from weft.data.tasks import OpenTask
    from weft.data.tokenizer import Tokenizer
    from weft.layout.mesh import Mesh
    from weft.models.values import Values
    from weft.recipe import Loss, ModelShape, Recipe
    from weft.sync.coded import Code
    from weft.train.step_loader import RunRecords, StepLoader


J = TypeVar("J", bound="Job")


@dataclass(frozen=True)
class Job:
    """A checked recipe with its data opened and the shape of its model complete; :func:`prepare` makes it.

    Attributes:
        ``recipe``: the recipe that the run has now.
        ``shape``: the model's shape, with its vocabulary and adapter.
        ``corpus``: the opened training and validation data, and the tokenizer.
        ``notes``: lines to print.
        ``tasks``: the opened tasks that the run evaluates.
        ``speeds``: relative speeds of all ranks; empty if all ranks are equally fast.
        ``files``: files that checkpoints hold beside the state, by name: the tokenizer, and files of the model to
            start from.
        ``given``: the recipe as it was given, where the run goes on with another one, because ranks were lost; else
            None.
    """

    recipe: Recipe
    shape: ModelShape
    corpus: Corpus
    notes: tuple[str, ...] = ()
    tasks: tuple[OpenTask, ...] = ()
    speeds: tuple[float, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    given: Recipe | None = None

    def loader(self, order: Order | RowList, mesh: Mesh) -> Loader:
        """Return this rank's loader of the samples in ``order``, the order of training or validation data."""
        data, layout = self.recipe.data, mesh.layout
        trains = order is self.corpus.train
        # each island has samples of its own to learn from, and all evaluate on the same
        if trains:
            layout = layout.model_copy(update={"island": mesh.islands})
        code = self._code(layout.dp) if trains else None
        # samples are dealt to the parts of jobs, of which a rank has several
        if code is not None:
            layout = layout.model_copy(update={"dp": code.jobs * code.parts})
        rows, passes = self.recipe.rows_per_pass(layout)
        cut = self.recipe.batch_layout(layout)
        first = mesh.island * cut.size("dp", "shard") if trains else 0
        ranks = [
            first
            + mesh.rank("dp") * cut.dp // layout.dp * mesh.size("shard")
            + mesh.rank("shard")
        ]
        if code is not None:
            own = code.parts_of(mesh.rank("dp"))
            ranks = [
                job * code.parts + part for job in range(code.jobs) for part in own
            ]
        speeds = self.batch_speeds(layout) if cut == mesh.layout else ()
        # the fast ones get more rows than all would, and have memory for no more in a pass
        if speeds:
            passes = max(
                passes, -(-max(shares_of(self.recipe.train.batch, speeds)) // rows)
            )
        # Only steps that train gather parameters once, which a balanced step needs.
        plan = None
        if mesh.layout.balance and trains:
            from weft.parallel.document_balance import costs_of, step_planner

            plan = step_planner(cut, costs_of(self.shape))
        return Loader(
            order, cut, ranks[0], mesh.rank("cp"), self.recipe.train.batch, rows, passes, data.seq_len, plan,
            ends=self.shape.output == "score",
            # A compiled model asks for one shape. Rows that are cut from a stream are full anyway.
            joined=not self.recipe.train.compile
            and (not hasattr(order, "streams") or any(s.rows_of != "tokens" for s in order.streams)),
            more=tuple(ranks[1:]), speeds=speeds,
            draws=self.recipe.train.seed if trains and self._draws_numbers else None,
        )  # fmt: skip

    @property
    def _draws_numbers(self) -> bool:
        """Whether training steps draw random numbers for each token."""
        shape, adapter = self.shape, self.shape.adapter
        return bool(shape.dropout or shape.small_ffn or (adapter and adapter.dropout))

    def training_loader(
        self, mesh: Mesh, built: Built, recorder: RunRecords, interrupted: Callable[[], bool], stack: ExitStack,
        kept: dict[str, Any],
    ) -> StepLoader:  # fmt: skip
        """Return the loader of the samples that this rank trains on. Collective.

        The other arguments are for jobs whose samples come from the model itself. ``built``: the model and its state.
        ``recorder``: writes the run's records. ``interrupted``: function that returns whether this rank is asked to end
        the run. ``stack``: closes what the loader has started, when the run ends. ``kept``: JSON values that the
        loader changes in place, and that checkpoints keep.
        """
        loader = self.loader(self.corpus.train, mesh)
        if self.corpus.train.legs and self.recipe.data.measures:
            from weft.train.measured_mix import measured_loader

            return measured_loader(
                self.recipe, self.corpus, loader, mesh, built, recorder, kept
            )
        return loader

    def judged(self, values: Mapping[str, float]) -> float | None:
        """Return the number by which evaluations are compared to find the best checkpoint; the lowest is best.

        It is the validation loss; None if ``values`` has none. ``values``: results of an evaluation by name, such as
        the loss on held-out data under "validation".
        """
        return values.get("validation")

    def learning_rate(self, step: int, steps: int) -> float:
        """Return the learning rate of step ``step`` (from 0) in a run of ``steps`` steps."""
        return learning_rate(self.recipe.optimizer, step, steps)

    def _code(self, ranks: int) -> Code | None:
        """Return the gradient code of the recipe for so many replicas; None without one."""
        if not self.recipe.resilience.code:
            return None
        from weft.sync.coded import code_of

        return code_of(self.recipe.resilience, ranks)

    def batch_speeds(self, layout: Layout) -> tuple[float, ...]:
        """Return the relative speed of each data rank of ``layout``; empty if all ranks are equally fast.

        A data rank is a group of ranks that share the same batches; its speed is that of its slowest rank.
        """
        if len(set(self.speeds)) < 2:
            return ()
        ranks = [
            Place.of(layout, rank).along(*BATCH_AXES) for rank in range(layout.world)
        ]
        return tuple(
            min(s for s, at in zip(self.speeds, ranks, strict=True) if at == place)
            for place in sorted(set(ranks))
        )

    def steps(self, progress: Progress) -> int:
        """Return the number of steps of the whole run: ``train.steps``, or fewer if the data ends first.

        ``progress``: the steps and samples so far. The steps that are left are counted with the recipe's batch size.
        """
        asked, total = self.recipe.train.steps, self.corpus.train.total
        if total is None:
            return asked
        end = progress.step + -(
            -max(0, total - progress.position) // self.recipe.train.batch
        )
        return min(asked or end, end)

    def facts(self, progress: Progress) -> dict[str, Any]:
        """Return recipe, layout, data fingerprint and number of steps, for the run's records and checkpoints.

        ``progress``: the steps and samples so far, from which the number of steps follows.
        """
        recipe = self.recipe.model_copy(update={"model": self.shape})
        facts = {
            "recipe": recipe.recorded(),
            "given": (self.given or self.recipe).recorded(given=True),
            "layout": str(recipe.layout),
            "world": recipe.layout.world,
            "data": self.corpus.fingerprint,
        }
        if self.shape.adapter is not None:
            from weft.checkpoint.resume_check import run_base

            if base := run_base(self.recipe, self.shape):
                facts["base"] = base
        return facts | {"steps": self.steps(progress)}


def device_type(recipe: Recipe) -> str:
    """Return ``cpu`` or ``cuda``, as ``train.device`` asks; with ``auto``, ``cuda`` if PyTorch sees a GPU.

    Raises :class:`UsageError` if the recipe asks for ``cuda`` and PyTorch sees no GPU.
    """
    wanted = recipe.train.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "train.device = 'cuda' but PyTorch sees no GPU; use device = 'cpu' or 'auto'"
        )
    return (
        wanted if wanted != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    )


def prepare(recipe: Recipe) -> Job:
    """Open the data, complete the model's shape, and check that layout, model, data and memory fit together.

    Raises :class:`UsageError` or :class:`WeftError` if they do not.
    """
    if recipe.rl is not None:
        job: Job = find("samples", "rl").implementation(recipe)
        return job
    for section in ("stream", "federated"):
        if getattr(recipe, section) is not None:
            job = find("samples", section).implementation(recipe)
            return job
    if own := recipe.model.architecture:
        job = own.prepare(recipe)
        return job
    check_sources(recipe.data)

    def opened(own: Tokenizer | None) -> Corpus:
        corpus = open_data(recipe.data, own)
        if len(recipe.data.sources) < 2 and recipe.data.mix == "static":
            return corpus
        # a run of one source does without mixtures
        from weft.train.mix_run import with_mix

        return with_mix(corpus, recipe)

    return completed_job(recipe, opened, Job)


def completed_job(
    recipe: Recipe, open_corpus: Callable[[Tokenizer | None], Corpus], kind: type[J]
) -> J:
    """Complete the model's shape, and check that layout, model, data and memory go together.

    ``open_corpus``: function that opens the data, given the tokenizer of the model that the run starts from or None.
    ``kind``: class of the result. Raises :class:`UsageError` or :class:`WeftError` if something does not fit.
    """
    pretrained = pretrained_of(recipe)
    shape = _completed(recipe, pretrained)
    check_fits(shape, recipe.layout, recipe.train, recipe.optimizer, recipe.memory)
    if shape.adapter or recipe.train.freeze:
        from weft.train.learning_parts import adapter_with_tokens, check_names

        check_names(shape, recipe.train)
    own = _own_tokenizer(recipe, pretrained)
    corpus = open_corpus(own)
    vocab = corpus.tokenizer.vocab
    if shape.vocab and vocab > shape.vocab:
        name = recipe.data.tokenizer or recipe.model.origin or "bytes"
        remedy = f"set model.vocab = {vocab}, so that embedding and output layer grow, or use the model's own tokenizer"
        if recipe.model.origin is None:
            remedy = "set model.vocab = 0 to take the tokenizer's size"
        elif shape.adapter:
            remedy += "; with adapter.tokens = 'new' the new rows learn"
        raise UsageError(
            f"tokenizer {name!r} has {vocab} entries but the model's vocabulary is {shape.vocab}; {remedy}"
        )
    shape = shape.model_copy(update={"vocab": shape.vocab or vocab})
    if shape.adapter:
        adapter_with_tokens(shape.adapter, shape, pretrained)
    check_fits(shape, recipe.layout, recipe.train, recipe.optimizer, recipe.memory)
    check_memory(recipe, shape)
    if recipe.layout.island > 1:
        from weft.sync.compress import build_compressor

        for p in parameters(shape):
            build_compressor(recipe.sync.compress).check(p.name, p.shape)
    if (corpus.validation is None and recipe.rl is None) and (
        recipe.validation.keep_best or recipe.validation.patience
    ):
        name = "keep_best" if recipe.validation.keep_best else "patience"
        raise UsageError(
            f"validation.{name} waits for validations, and no document is held out for one; set data.validation to a "
            "share or a file"
        )
    tasks: tuple[OpenTask, ...] = ()
    if asked := [task for task in recipe.tasks if not task.reward]:
        from weft.data.tasks import open_tasks

        tasks = open_tasks(
            asked, corpus.tokenizer, recipe.model.origin or "the tokenizer"
        )
    reference_model(recipe, corpus.tokenizer)
    check_teachers(recipe, shape.vocab, corpus.tokenizer)
    notes = (*_tokenizer_notes(recipe, own, corpus.tokenizer), *corpus.notes)
    files = _files(pretrained, own, corpus.tokenizer)
    if (most := context_length(files)) and recipe.data.seq_len > most:
        notes += (
            f"data.seq_len = {recipe.data.seq_len} is longer than the {most} tokens of the model's config.json "
            "(max_position_embeddings), which its export will say again",
        )
    return kind(recipe, shape, corpus, notes, tasks, files=files)


def build_for_training(
    shape: ModelShape, mesh: Mesh, recipe: Recipe, values: Values | None = None,
    passed: Callable[[int, int], None] | None = None,
    report: Callable[[dict[str, Any]], None] = lambda chosen: None,
) -> Built:  # fmt: skip
    """Build the model and its state under ``mesh``, with the optimizer, ready for the first step. Collective.

    ``values``: initial parameter values, by default seeded random ones. ``passed``: called after each forward and
    backward pass with the number of passes done and of all passes. ``report``: called with a dict if Weft chooses how
    many blocks' activations are offloaded: this number, and the measured rates from which it follows.
    """
    memory = recipe.memory
    if (
        recipe.optimizer.estimate == "zeroth-order"
        and memory.place_of("gradients") == "file"
    ):
        # there are none, so they take no room in a file
        memory = memory.model_copy(update={"gradients": "host"})
    with passing_by_the_heap() if "file" in memory.away.values() else nullcontext():
        model, state = parallelize(
            shape,
            mesh,
            recipe.train,
            values,
            recipe.data.seq_len,
            memory,
            summed=not recipe.resilience.combines,
            hooks=run_hooks(recipe, shape.vocab, passed),
            report=report,
            optimizer=RuleOptimizer(recipe.optimizer, mesh),
        )
    if recipe.rl is not None:
        from weft.train.rl_states import add_rl_states

        add_rl_states(state, shape, mesh, recipe, values)
    if mesh.islands > 1:
        from weft.train.island_state import add_slots

        add_slots(state, recipe.sync)
    return Built(model, state)


def run_hooks(
    recipe: Recipe, vocab: int, passed: Callable[[int, int], None] | None = None
) -> Hooks:
    """Return the hooks of a run: its loss, and the function that each pass calls when it is done.

    The loss is the policy loss of reinforcement learning, or that of the section ``[loss]``. ``vocab``: size of the
    vocabulary. ``passed``: called after each forward and backward pass with the number of passes done and of all
    passes.
    """
    if recipe.rl is None:
        return hooks_of(recipe.loss, vocab, passed)
    from weft.models.policy_loss import PolicyObjective

    objective = PolicyObjective(recipe.rl.policy_loss, recipe.rl.temperature)
    return Hooks(objective=objective, passed=passed)


def hooks_of(
    loss: Loss, vocab: int, passed: Callable[[int, int], None] | None = None
) -> Hooks:
    """Return the hooks of a model's passes: the loss that ``loss.kind`` names, and the function ``passed``.

    For cross entropy the hooks have no loss, so that passes use the model's own. ``vocab``: size of the vocabulary.
    ``passed``: called after each forward and backward pass with the number of passes done and of all passes.
    """
    if loss.of_pairs:
        from weft.models.preference import objective

        return Hooks(objective=objective(loss), passed=passed)
    if loss.is_own:
        from weft.models.plugin_loss import plugin_loss

        return Hooks(plugin_loss(loss, vocab), passed=passed)
    return Hooks(passed=passed)


def pretrained_of(recipe: Recipe) -> Pretrained | None:
    """Open the pretrained model that ``model.from`` names; None if the recipe has no ``model.from``."""
    if recipe.model.origin is None:
        return None
    from weft.checkpoint.weights import open_pretrained

    return open_pretrained(recipe.model.origin)


def reference_model(recipe: Recipe, tokenizer: Tokenizer) -> Pretrained | None:
    """Open the reference model that ``loss.reference`` names; None if the recipe has no ``loss.reference``.

    ``tokenizer``: the run's tokenizer. Raises :class:`UsageError` if the model has other tokens or no weights.
    """
    if (name := recipe.loss.reference) is None:
        return None
    from weft.checkpoint.weights import open_pretrained

    reference = open_pretrained(name)
    if reference.values is None or reference.shape.output == "score":
        raise UsageError(
            f"loss.reference = {name!r} has no weights that write text; name a folder with some"
        )
    own = reference.tokenizer()
    if (
        own and not own.has_ids_of(tokenizer)
    ) or reference.shape.vocab < tokenizer.vocab:
        raise UsageError(
            f"loss.reference = {name!r} has other tokens ({own.vocab if own else reference.shape.vocab}) than this run "
            f"({tokenizer.vocab}), so it cannot say how likely an answer is; name a model with the same tokenizer"
        )
    return reference


def check_teachers(recipe: Recipe, vocab: int, tokenizer: Tokenizer) -> None:
    """Check that the teachers of ``loss.teachers`` exist, and that token ids mean the same tokens as in the model.

    ``vocab``: size of the model's vocabulary. ``tokenizer``: the run's tokenizer. Raises :class:`UsageError` for the
    first teacher that fails.
    """
    if not recipe.loss.teachers:
        return
    from weft.checkpoint.weights import open_pretrained

    for name in recipe.loss.teachers:
        teacher = open_pretrained(name)
        if teacher.values is None or teacher.shape.output == "score":
            raise UsageError(
                f"loss.teachers: {name!r} has no weights that write text; name a model with some"
            )
        own = teacher.tokenizer()
        if (own and not own.has_ids_of(tokenizer)) or teacher.shape.vocab != vocab:
            raise UsageError(
                f"loss.teachers: {name!r} has other tokens ({teacher.shape.vocab}) than this run ({vocab}); name "
                "models with the same tokenizer and vocabulary"
            )


def model_shape(recipe: Recipe) -> ModelShape:
    """Return the model's shape with its adapter, from section ``[model]`` or the model that ``model.from`` names."""
    return _completed(recipe, pretrained_of(recipe))


def _completed(recipe: Recipe, pretrained: Pretrained | None) -> ModelShape:
    shape = recipe.model
    if pretrained is not None:
        from weft.shapes.origin_shape import begun_shape

        shape = begun_shape(shape, pretrained.shape)
    if recipe.loss.scores:
        shape = shape.model_copy(update={"output": "score", "tied": False})
    elif shape.output == "score":
        raise UsageError(
            f"model.from = {recipe.model.origin!r} is a reward model, which scores texts; loss.kind = "
            f"{recipe.loss.kind!r} needs one that writes them"
        )
    critic = recipe.rl is not None and recipe.rl.policy_loss.needs_values
    critic = critic and not (recipe.roles and recipe.roles.critic.is_apart)
    if shape.value_head != critic:
        shape = shape.model_copy(update={"value_head": critic})
    if recipe.adapter is not None and shape.adapter not in (None, recipe.adapter):
        raise UsageError(
            f"model.from = {recipe.model.origin!r} has an adapter of rank {shape.adapter.rank} already; leave out "
            "[adapter] to go on with it, or merge it first: weft export --merge"
        )
    if recipe.adapter is None:
        return shape
    from weft.train.learning_parts import adapter_with_tokens

    return shape.model_copy(
        update={"adapter": adapter_with_tokens(recipe.adapter, shape, pretrained)}
    )


def recipe_tokenizer(recipe: Recipe) -> Tokenizer:
    """Return the tokenizer that ``data.tokenizer`` names; without it, that of the pretrained model."""
    return tokenizer_of_data(recipe.data, _own_tokenizer(recipe, pretrained_of(recipe)))


def _own_tokenizer(recipe: Recipe, pretrained: Pretrained | None) -> Tokenizer | None:
    """Return the pretrained model's tokenizer. Raises :class:`UsageError` if neither it nor the recipe has one."""
    if pretrained is None:
        return None
    # which need not be theirs, that may be one that nobody can read
    if recipe.data.tokenizer:
        with suppress(WeftError):
            return pretrained.tokenizer()
        return None
    own = pretrained.tokenizer()
    if own is None and pretrained.values is not None:
        reason = pretrained.files.get(
            NO_TOKENIZER, b"no tokenizer.json is beside them"
        ).decode()
        raise UsageError(
            f"model.from = {recipe.model.origin!r} needs its own tokenizer, and data.tokenizer is left out; the "
            f"weights have none: {reason}; set data.tokenizer = the path of theirs"
        )
    return own


def _tokenizer_notes(
    recipe: Recipe, own: Tokenizer | None, tokenizer: Tokenizer
) -> tuple[str, ...]:
    """Return notes on a pretrained model that the recipe trains with another tokenizer."""
    if recipe.model.origin is None or (own is not None and own.has_ids_of(tokenizer)):
        return ()
    if own is None and recipe.data.tokenizer:
        return ()
    if own is None:
        return (
            f"model.from = {recipe.model.origin!r} has no tokenizer and data.tokenizer is left out: it is 'bytes'",
        )
    return (
        f"data.tokenizer = {recipe.data.tokenizer!r} ({tokenizer.vocab} entries) is not the tokenizer of "
        f"{recipe.model.origin!r} ({own.vocab}), whose ids meant other text; leave it out to take theirs",
    )


def _files(
    pretrained: Pretrained | None, own: Tokenizer | None, tokenizer: Tokenizer
) -> dict[str, bytes]:
    """Return the files that checkpoints hold beside the state. ``own``: the pretrained model's tokenizer."""
    files = tokenizer.files()
    carried = (
        {}
        if pretrained is None
        else {n: c for n, c in pretrained.files.items() if n != NO_TOKENIZER}
    )
    return files_of_run(
        carried, files, same_tokenizer=own is not None and own.files() == files
    )


def state_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Return the bytes in memory, over all ranks, of all parameters and of the gradients and moments of trained ones.

    Tensors that rest in files are not counted.
    """
    train, wide = recipe.train, 8 if recipe.train.dtype == "float64" else 4
    here = {
        kind: recipe.memory.place_of(kind) != "file"
        for kind in ("weights", "gradients", "moments")
    }
    moments = here["moments"] * slot_bytes(recipe.optimizer, wide)
    learning = (
        here["weights"] + here["gradients"] * (not recipe.optimizer.in_backward)
    ) * wide + moments
    frozen = here["weights"] * (2 if train.dtype == "bfloat16" else wide)
    return sum(
        p.numel
        * (
            learning
            if learns(p.name, shape, train.freeze)
            else 1
            if p.is_bytes
            else frozen
        )
        for p in parameters(shape)
    )


#: Bytes of a rank's process at the least, before it holds any of the model: Python and PyTorch.
PROCESS = 150 << 20


def check_memory(recipe: Recipe, shape: ModelShape, here: int = 0) -> None:
    """Raise :class:`WeftError` if parameters, gradients and moments alone need more memory than there is.

    ``here``: number of ranks on this machine; 0 means the number that the launcher has set, or all ranks.
    """
    parameters = parameter_count(shape, shape.vocab)
    need = state_bytes(shape, recipe) / recipe.layout.size(
        "pp", "shard", "cp", *MODEL_AXES
    )
    cuda = device_type(recipe) == "cuda" and not recipe.memory.offloads_state
    if cuda:
        free, ranks = torch.cuda.get_device_properties(0).total_memory, 1
    else:
        free = psutil.virtual_memory().available
        ranks = here or int(os.environ.get("LOCAL_WORLD_SIZE", recipe.layout.world))
    started = here or "LOCAL_WORLD_SIZE" in os.environ
    if not cuda and not started and (ranks - 1) * PROCESS > free:
        raise WeftError(
            f"too little memory: {ranks} ranks take at least {ranks * PROCESS / 2**30:.1f} GiB for their processes "
            f"alone, and this machine has {free / 2**30:.1f}; choose a layout with fewer ranks"
        )
    if need * ranks > free:
        size = (
            f"{parameters / 1e9:.2f}B"
            if parameters >= 1e8
            else f"{parameters / 1e6:.1f}M"
        )
        copies = recipe.layout.size("island", "dp")
        fewer = (
            f"lower layout.{'dp' if recipe.layout.dp > 1 else 'island'}, "
            if copies > 1 and not cuda
            else ""
        )
        raise WeftError(
            f"too little memory: {size} parameters{f' on {ranks} ranks' if ranks > 1 else ''} need "
            f"{need * ranks / 2**30:.1f} GiB for weights, gradients and optimizer state, and this "
            f"{'device' if cuda else 'machine'} has {free / 2**30:.1f}; "
            f"{fewer}raise layout.shard or layout.tp, or choose a smaller model"
        )
