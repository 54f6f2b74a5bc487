"""The one table of what cannot be combined: training, both proofs and the fuzzer refuse what it lists.

An entry has a condition, the reason for the refusal, and a remedy. It is tested as soon as all that it reads is known:
of a layout alone when that is made, the others with the recipe, or when the model is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from weft.errors import nearest
from weft.layout.layout import LAYOUT_RULES
from weft.recipe.adapter import Adapter
from weft.recipe.checkpoint_section import Checkpoint
from weft.recipe.generate_section import Generate
from weft.recipe.loss_section import Loss
from weft.recipe.memory_section import MEMORY_RULES
from weft.recipe.model_shape import ModelShape
from weft.recipe.step_techniques import AskedStep, asked_techniques, refuse_filled_twice
from weft.recipe.train_section import Train
from weft.recipe.validation_section import Task, Validation
from weft.refusal import Rule, refuse
from weft.registry import KINDS, declared, find, names

if TYPE_CHECKING:
    from weft.recipe.rl_section import Reinforcement
    from weft.recipe.roles_section import Roles


class AskedRecipe(AskedStep):
    """Settings of a recipe, as the rules against conflicts read them.

    ``model``: the section ``[model]`` as the user wrote it. ``shape``: the same section, completed by the settings that
    the user did not write. ``staged``: whether a pipeline schedule is needed even for one rank. The other attributes
    are the sections of the same names.
    """

    model: ModelShape
    shape: ModelShape
    adapter: Adapter | None
    train: Train
    loss: Loss
    validation: Validation
    tasks: tuple[Task, ...]
    checkpoint: Checkpoint
    generate: Generate | None
    rl: Reinforcement | None
    roles: Roles | None
    staged: bool = False

    @property
    def ranks_in_node(self) -> int:
        """Number of ranks along ``ep`` in each node; 0 if ``layout.node`` is not set or nodes differ in this number."""
        # with NumPy, which a command that only reads a recipe does without
        from weft.layout.placement_groups import experts_per_node

        return experts_per_node(self.layout) if self.layout.node else 0

    @property
    def widths(self) -> list[int]:
        """Hidden widths of the feed-forwards that ``tp`` cuts.

        These are the width of dense layers and that of experts. The width of experts is left out if there are none, or
        if experts are spread over the ranks of ``tp`` instead (``layout.folds_tp``).
        """
        of_experts = (
            self.shape.expert_ffn
            if self.shape.mixtures and not self.layout.folds_tp
            else None
        )
        return [
            w
            for w in (self.shape.ffn, self.shape.small_ffn or None, of_experts)
            if w is not None
        ]

    @property
    def least_experts(self) -> int:
        return min(self.shape.mixtures.values())

    @property
    def narrowest_expert(self) -> int:
        """The smallest hidden width of an expert's part on a rank, where ``ep`` cuts experts; 1 without experts.

        Experts are cut only in layers with fewer experts than ``ep``. Each is then cut in ``ep / experts`` pieces, and
        the pieces by ``tp``. If ``experts`` does not divide ``ep``, the result is 0. In all other layers an expert
        counts with its whole width, even if ``tp`` cuts it.
        """
        widths = [self.shape.expert_ffn or 0] if self.shape.mixtures else [1]
        for count in self.shape.mixtures.values():
            pieces, rest = divmod(self.layout.ep, count)
            if self.layout.ep > count:
                cuts = pieces * (1 if self.layout.folds_tp else self.layout.tp)
                widths.append(0 if rest else (self.shape.expert_ffn or 0) // cuts)
        return min(widths)

    @property
    def least_heads(self) -> int:
        """Number of query heads of the rank of ``tp`` that has the fewest."""
        layout, heads = self.layout, self.shape.heads
        if layout.tp_shares in ((), "auto"):
            return heads // layout.tp
        # with NumPy, which a command that only reads a recipe does without
        from weft.layout.placement import cut_range

        cuts = [cut_range(heads, layout, ("tp",), rank) for rank in range(layout.tp)]
        return min(last - first for first, last in cuts)

    @property
    def odd_width(self) -> int | None:
        """The first hidden width in :attr:`widths` of which ``tp`` gives some rank a part that begins at an odd column.

        None if all parts begin at even columns, as storing two numbers in a byte requires.
        """
        # with NumPy, which a command that only reads a recipe does without
        from weft.layout.placement import cut_range

        layout = self.layout
        odd = (
            w
            for w in self.widths
            for i in range(layout.tp)
            if cut_range(w, layout, ("tp",), i)[0] % 2
        )
        return next(odd, None)

    @property
    def learns_loads(self) -> bool:
        """Whether routers are adjusted after each step by how often every expert was chosen in it."""
        shape = self.shape
        moves = shape.router == "sigmoid" and shape.bias_rate > 0
        return bool(shape.mixtures) and (moves or shape.balance == "step")

    @property
    def builder(self) -> Any:
        """Builder of the pipeline schedule (:class:`weft.schedule.builder.ScheduleBuilder`).

        None without a pipeline, or for an unknown ``layout.schedule``.
        """
        name = self.layout.schedule
        if not (self.staged or self.layout.pp > 1) or name not in names("schedule"):
            return None
        return find("schedule", name).implementation()

    @property
    def chunks(self) -> int:
        """Number of pipeline stages that a rank holds: ``layout.virtual``, or the number that the schedule fixes."""
        return int(self.layout.virtual or self.builder.chunks)

    @property
    def stages(self) -> int:
        return self.layout.pp * self.chunks

    @property
    def least_layers(self) -> int:
        """The fewest layers with which no pipeline stage is empty.

        Embedding and output layer can fill a stage each without a layer, unless ``layout.vocab_barriers`` or
        ``layout.takes_turns`` holds.
        """
        return self.stages - (
            0 if self.layout.vocab_barriers or self.layout.takes_turns else 2
        )

    @property
    def most_skipped(self) -> float:
        """The largest share of pipeline stages that may be skipped, from 0 to 1.

        It is two thirds of the stages between the first and the last, divided by the number of all stages.
        """
        return max(0, self.layout.pp - 2) * 2 / 3 / self.layout.pp

    @property
    def possible_partners(self) -> str:
        return " or ".join(map(repr, self.sync.method.partners))

    @property
    def near_schedule(self) -> str:
        return nearest(self.layout.schedule, names("schedule"))

    @property
    def free_schedules(self) -> str:
        return ", ".join(
            each.name for each in declared("schedule") if each.implementation.free
        )


def _linear(a: AskedRecipe) -> bool:
    return any(a.shape.mixer_of(i) != "softmax" for i in range(a.shape.layers))


RULES: tuple[Rule[AskedRecipe], ...] = (
    *LAYOUT_RULES,
    *MEMORY_RULES,
    Rule("weights in files with balance", "layout memory",
         lambda a: a.memory.weights == "file" and bool(a.layout.balance),
         "memory.weights = 'file' takes all microbatches through a block together, and layout.balance = "
         "{0.layout.balance!r} gives every rank others", "leave one of them out"),
    Rule("offloaded activations with selective recompute", "train memory",
         lambda a: a.memory.offloads_activations and a.train.recompute == "selective",
         "memory.activations = {0.memory.activations!r} does not see what train.recompute = 'selective' keeps",
         "use train.recompute = 'none' or 'full'"),
    Rule("chosen experts without experts in files", "memory shape layout",
         lambda a: a.memory.experts == "chosen"
         and (a.memory.weights != "file" or not a.shape.mixtures or a.layout.secondary > 0
              or a.layout.placement != "static" or a.layout.dispatch in ("adaptive", "timed")),
         "memory.experts = 'chosen' is for a mixture whose experts rest in files of their own ranks",
         "set memory.weights = 'file' for a mixture, with layout.secondary, placement and dispatch as by default, or "
         "leave it out"),
    Rule("small moments without AdamW", "optimizer",
         lambda a: a.optimizer.state != "float32" and a.optimizer.kind != "adamw",
         "optimizer.state = {0.optimizer.state!r} is how AdamW keeps its moments, and optimizer.kind is "
         "{0.optimizer.kind!r}", "leave optimizer.state out, or use kind = 'adamw'"),
    Rule("use of no average", "optimizer", lambda a: a.optimizer.use_ema and not a.optimizer.ema,
         "optimizer.use_ema asks for an average that is not kept", "set optimizer.ema = 0.999, say, or leave it out"),
    Rule("export of no adapter", "adapter checkpoint",
         lambda a: a.checkpoint.export == "adapter" and a.adapter is None,
         "checkpoint.export = 'adapter', but there is none", "use 'model', or add [adapter]"),
    Rule("before without an origin", "generate model",
         lambda a: bool(a.generate and a.generate.before and a.model.origin is None),
         "generate.before is for models that start from another", "set model.from, or leave it out"),
    Rule("tasks with vocabulary passes", "layout tasks",
         lambda a: bool(a.tasks) and a.layout.vocab_barriers > 0,
         "tasks ask the output layer for more than the loss, which is all that passes of layout.vocab_barriers compute",
         "leave one of them out"),
    Rule("a plugin's model cut within", "layout shape",
         lambda a: a.shape.is_plugin and (a.layout.size("pp", "cp", "tp") > 1 or bool(a.layout.balance)),
         "a plugin's model is whole on every rank, and layout {0.layout} cuts what is inside of it",
         "use dp and shard alone"),
    Rule("a plugin's model without blocks", "shape train memory",
         lambda a: a.shape.is_plugin
         and (a.train.recompute != "none" or a.memory.offloads_activations or a.memory.weights == "file"
              or a.train.compile or bool(a.shape.adapter)),
         "train.recompute, train.compile, memory.activations, memory.weights = 'file' and [adapter] are for the blocks "
         "of Weft's own models, "
         "and model.kind = {0.shape.kind!r} is a plugin's", "leave them out"),
    Rule("export of a plugin's model", "checkpoint model",
         lambda a: bool(a.model.is_plugin and (a.checkpoint.export or a.model.origin)),
         "model.from and checkpoint.export are about models that others know, and model.kind = "
         "{0.model.kind!r} is a plugin's", "leave them out"),
    Rule("a plugin's model with pairs", "loss model", lambda a: bool(a.model.kind) and a.loss.of_pairs,
         "loss.kind = {0.loss.kind!r} compares pairs of answers by Weft's own models, and model.kind = "
         "{0.model.kind!r} is a plugin's", "leave one of them out"),
    Rule("a plugin's loss with vocabulary passes", "layout loss",
         lambda a: a.loss.is_own and a.layout.vocab_barriers > 0,
         "loss.kind = {0.loss.kind!r} of a plugin sees whole rows of logits, and layout.vocab_barriers computes "
         "with parts of them on every stage", "leave layout.vocab_barriers out"),
    Rule("tasks of a model that scores", "loss tasks",
         lambda a: bool(a.tasks) and a.loss.scores,
         "[[tasks]] ask what a model writes, and loss.kind = 'reward' trains one that scores", "leave tasks out"),
    Rule("rewards over islands", "layout rl", lambda a: a.rl is not None and a.layout.island > 1,
         "[rl] writes answers with one model, and layout.island = {0.layout.island} trains several",
         "leave layout.island out"),
    Rule("rewards with balance", "layout rl", lambda a: a.rl is not None and bool(a.layout.balance),
         "layout.balance = {0.layout.balance!r} plans steps from documents that are known before, and [rl] writes them "
         "meanwhile", "leave layout.balance out"),
    Rule("rewards without gradients", "optimizer rl",
         lambda a: a.rl is not None and a.optimizer.estimate == "zeroth-order",
         "[rl] needs gradients, and optimizer.estimate = 'zeroth-order' estimates them from losses alone",
         "leave optimizer.estimate out"),
    Rule("rewards of combined replicas", "resilience rl",
         lambda a: a.rl is not None and (a.resilience.combines or bool(a.resilience.code)),
         "[rl] divides losses by the tokens of all replicas together, and resilience combines replicas that have "
         "divided by their own", "leave resilience.aggregate and resilience.code out"),
    Rule("pairs without zeroth order", "optimizer",
         lambda a: a.optimizer.pairs and a.optimizer.estimate != "zeroth-order",
         "optimizer.pairs is about the two points that zeroth-order estimates evaluate",
         "set optimizer.estimate = 'zeroth-order', or leave pairs out"),
    Rule("pairs with a rank left over", "layout optimizer",
         lambda a: a.optimizer.pairs and a.layout.dp > 1 and a.layout.dp % 2 > 0,
         "optimizer.pairs takes two ranks along dp at a time, and dp={0.layout.dp} is odd", "use an even dp"),
    Rule("faulty replicas of a mean", "resilience",
         lambda a: a.resilience.faulty > 0 and a.resilience.aggregate == "mean",
         "resilience.faulty = {0.resilience.faulty} replicas sway a mean as they like",
         "set resilience.aggregate to a rule that they cannot sway, or leave faulty out"),
    Rule("a code without stragglers", "layout resilience",
         lambda a: bool(a.resilience.code) != (a.resilience.stragglers > 0)
         or a.resilience.stragglers >= a.layout.dp > 1,
         "resilience.code = {0.resilience.code!r} is about stragglers = {0.resilience.stragglers} of "
         "dp={0.layout.dp} replicas", "set code and stragglers, below layout.dp, or leave both out"),
    Rule("combined replicas that are cut", "layout resilience",
         lambda a: a.resilience.combines and a.layout.world > a.layout.dp,
         "resilience puts together gradients of whole replicas, and {0.layout} cuts these", "use layout.dp alone"),
    Rule("combined replicas with a state apart", "layout train memory resilience",
         lambda a: a.resilience.combines
         and (a.train.dtype == "bfloat16" or bool(a.memory.away) or bool(a.layout.balance)),
         "resilience puts together gradients after backward, in their full precision and on the device, and "
         "train.dtype = 'bfloat16', [memory] and layout.balance have them otherwise", "leave these out"),
    Rule("balance with pairs", "layout loss", lambda a: bool(a.layout.balance) and a.loss.of_pairs,
         "layout.balance = {0.layout.balance!r} places documents one by one, and loss.kind = {0.loss.kind!r} "
         "compares two of them", "leave layout.balance out"),
    Rule("vocabulary passes without a vocabulary", "layout loss",
         lambda a: a.layout.vocab_barriers > 0 and a.loss.scores,
         "layout.vocab_barriers cuts the output layer, and a reward model has one number there",
         "leave layout.vocab_barriers out"),
    Rule("adapter under a new head", "adapter loss",
         lambda a: a.loss.scores and a.adapter is not None,
         "loss.kind = 'reward' learns an output layer of its own, and what is stored of [adapter] has adapters alone",
         "leave [adapter] out; train.freeze keeps layers as they are"),
    Rule("rows of tokens with vocabulary passes", "layout adapter",
         lambda a: a.layout.vocab_barriers > 0 and bool(a.adapter and a.adapter.tokens),
         "adapter.tokens are rows beside embedding and output layer, of which layout.vocab_barriers gives every stage "
         "a part", "use adapter.whole, or leave layout.vocab_barriers out"),
    Rule("dropout with compile", "train adapter",
         lambda a: a.train.compile and bool(a.adapter and a.adapter.dropout),
         "adapter.dropout draws by the numbers of tokens, which train.compile does not see", "leave one of them out"),
    Rule("dropout of layers with compile", "train shape",
         lambda a: a.train.compile and a.shape.dropout > 0,
         "model.dropout draws by the numbers of tokens, which train.compile does not see", "leave one of them out"),
    Rule("drawn modules with compile", "train shape", lambda a: a.train.compile and a.shape.small_ffn > 0,
         "model.small_ffn draws by the numbers of tokens, which train.compile does not see", "leave one of them out"),
    Rule("islands with weights that rest or move", "layout memory",
         lambda a: a.layout.island > 1 and (a.memory.weights == "file" or a.layout.placement == "moving"),
         "islands compare weights between steps, and memory.weights = 'file' or layout.placement = 'moving' have them "
         "elsewhere then", "leave one of them out"),
    Rule("islands with pairs or codes", "layout optimizer resilience",
         lambda a: a.layout.island > 1 and (a.optimizer.pairs or bool(a.resilience.code)),
         "optimizer.pairs and resilience.code deal samples to several replicas, and islands have samples of their own",
         "leave one of them out"),
    Rule("fragments of what goes whole", "sync",
         lambda a: not a.sync.method.in_fragments and (a.sync.fragments > 1 or a.sync.delay > 0),
         "sync.fragments and sync.delay are about update = 'streaming', and it is {0.sync.update!r}",
         "leave them out"),
    Rule("an answer after the next question", "sync", lambda a: a.sync.delay >= a.sync.every > 0,
         "sync.delay = {0.sync.delay} steps after a round began the next one has begun, with every = "
         "{0.sync.every}", "set delay below every"),
    Rule("neighbours that make one model", "sync",
         lambda a: a.sync.partner not in a.sync.method.partners,
         "sync.update = {0.sync.update!r} does not go with partner = {0.sync.partner!r}: it goes with "
         "{0.possible_partners}", "change one of them"),
    Rule("a graph of other islands", "layout sync",
         lambda a: a.layout.island > 1 and a.sync.partner == "graph"
         and not links_all(a.sync.graph, a.layout.island),
         "sync.partner = 'graph' links all of island={0.layout.island}, from 0 on, with each other by way of some, and "
         "sync.graph = {0.sync.graph} does not", "give pairs of islands, as sync.graph = [[0, 1], [1, 2]]"),
    Rule("a graph for nobody", "sync", lambda a: bool(a.sync.graph) and a.sync.partner != "graph",
         "sync.graph is about partner = 'graph', and it is {0.sync.partner!r}", "set sync.partner = 'graph'"),
    Rule("compressed neighbours", "sync",
         lambda a: a.sync.compress != "none"
         and a.sync.partnership != "all",
         "sync.compress = {0.sync.compress!r} is for differences from an anchor that all islands share, and "
         "neighbours have anchors of their own", "leave it out"),
    Rule("a way back without one there", "sync",
         lambda a: bool(a.sync.compress_back)
         and (a.sync.compress == "none" or any(c and c.in_rings for c in a.sync.compressors)),
         "sync.compress_back is about the answer to what sync.compress = {0.sync.compress!r} has made small, "
         "and 'none' and 'powersgd' have none of its own", "leave it out"),
    Rule("judged answers without a whole step's passes", "optimizer loss resilience",
         lambda a: a.loss.of_pairs and a.loss.pair_loss.has_point and (a.optimizer.estimate == "zeroth-order"
         or a.optimizer.post_validation or a.resilience.combines),
         "loss.kind = 'kto' first passes over a whole step to see how far the model has moved, which zeroth order, "
         "post-validation, gradient codes and aggregation of replicas have no place for", "leave these out"),
    Rule("settings for what has none", "sync",
         lambda a: a.sync.allocate > 0 and not getattr(a.sync.compressors[0], "adjustable", False),
         "sync.allocate chooses ranks, shares or bits, and sync.compress = {0.sync.compress!r} has none",
         "leave it out, or set sync.compress = 'powersgd:4', 'topk:0.01' or 'int6'"),
    Rule("islands that never agree", "layout train sync",
         lambda a: a.layout.island > 1 and a.sync.every > a.train.steps > 0,
         "sync.every = {0.sync.every} is beyond the run's train.steps = {0.train.steps}, so that islands would "
         "never agree", "lower sync.every"),
    Rule("islands that end early", "layout validation",
         lambda a: a.layout.island > 1 and a.validation.patience > 0,
         "validation.patience ends an island when its own loss gets no lower, and the others would wait for it",
         "leave it out"),
    Rule("sum in training", "layout model", lambda a: bool(a.layout.sum),
         "layout.sum = {0.layout.sum!r} is how ranks that generate add up, with whole norms on each, and training cuts "
         "these", "leave it out of the recipe, and give it to weft generate or serve in --layout"),
    Rule("tp above heads", "layout shape", lambda a: a.shape.heads < a.layout.tp,
         "tp={0.layout.tp} is more than the model's {0.shape.heads} heads", "use tp <= {0.shape.heads}"),
    Rule("tp above ffn", "layout shape", lambda a: (a.shape.ffn or 0) < a.layout.tp,
         "tp={0.layout.tp} is more than the model's {0.shape.ffn} ffn", "use tp <= {0.shape.ffn}"),
    Rule("ep without experts", "layout shape", lambda a: a.layout.ep > 1 and not a.shape.mixtures,
         "ep = {0.layout.ep} spreads experts over ranks, and the model has none",
         "leave ep out, or set model.experts"),
    Rule("moving experts in pieces", "layout shape",
         lambda a: a.layout.placement == "moving" and bool(a.shape.mixtures) and a.least_experts < a.layout.ep,
         "placement = 'moving' moves whole experts, and ep = {0.layout.ep} cuts {0.least_experts} in pieces",
         "use placement = 'sharded'"),
    Rule("moving experts with such an optimizer", "layout optimizer",
         lambda a: a.layout.placement == "moving"
         and (a.optimizer.state != "float32" or not a.optimizer.elementwise),
         "placement = 'moving' takes rows of an expert's state along, and optimizer.kind = {0.optimizer.kind!r} with "
         "state = {0.optimizer.state!r} keeps other things, too",
         "use placement = 'sharded', or 'adamw', 'lion' or 'sgd' in float32"),
    Rule("ep above experts", "layout shape", lambda a: a.narrowest_expert < 1,
         "ep = {0.layout.ep} cuts the {0.least_experts} experts of a layer, {0.shape.expert_ffn} wide, in no equal "
         "number of pieces each", "use ep <= {0.least_experts}, or a multiple of it"),
    Rule("tp above expert ffn", "layout shape", lambda a: bool(a.shape.mixtures) and min(a.widths) < a.layout.tp,
         "tp={0.layout.tp} is more than the experts' {0.shape.expert_ffn} expert_ffn",
         "use tp <= {0.shape.expert_ffn}"),
    # 0: the tokenizer's, not known
    Rule("tp above vocab", "layout shape", lambda a: 0 < a.shape.vocab < a.layout.tp,
         "tp={0.layout.tp} is more than the model's {0.shape.vocab} vocab", "use tp <= {0.shape.vocab}"),
    Rule("ulysses that does not divide", "layout shape", lambda a: a.layout.cp % a.layout.head_ranks > 0,
         "layout.ulysses = {0.layout.head_ranks} does not divide cp={0.layout.cp}", "use a divisor of cp"),
    Rule("ulysses above heads", "layout shape",
         lambda a: a.layout.head_ranks > 1 and a.least_heads < a.layout.head_ranks,
         "Ulysses cannot split {0.shape.heads} heads over tp={0.layout.tp} x {0.layout.head_ranks} ranks",
         "set layout.context = 'zigzag' or a smaller layout.ulysses"),
    Rule("stages without pp", "layout shape",
         lambda a: a.layout.pp == 1 and bool(a.layout.skip or a.layout.vocab_barriers),
         "layout.skip and layout.vocab_barriers are about pipeline stages", "set layout.pp above 1"),
    Rule("overlap of a ladder", "layout shape",
         lambda a: bool(a.layout.overlap) and a.shape.residual == "ladder",
         "model.residual = 'ladder' lets sums travel under the next part, and layout.overlap = {0.layout.overlap!r} "
         "cuts parts in another way", "leave out layout.overlap"),
    Rule("overlap without exchanges", "layout shape",
         lambda a: a.layout.takes_turns and (a.layout.pp == 1 or not a.shape.mixtures),
         "layout.overlap = {0.layout.overlap!r} is about exchanges of experts in a pipeline",
         "set pp and model.experts, or leave it out"),
    Rule("overlap with recomputation", "layout train memory",
         lambda a: a.layout.takes_turns
         and (a.train.recompute != "none" or a.memory.offloads_activations or a.memory.weights == "file"),
         "layout.overlap = {0.layout.overlap!r} runs layers in parts, and train.recompute, memory.activations and "
         "memory.weights = 'file' are about whole ones", "leave out layout.overlap, or the others"),
    Rule("skip with a schedule", "layout shape", lambda a: a.layout.skip > 0 and a.layout.schedule != "1f1b",
         "layout.skip plans a schedule of its own", "leave out layout.schedule = {0.layout.schedule!r}"),
    Rule("skip of too many stages", "layout shape",
         lambda a: a.layout.skip > 0 and a.layout.skip > a.most_skipped * (1 + 1e-9),
         "skipping {0.layout.skip:.0%} of pp={0.layout.pp} stages leaves too little of those that may be skipped (the "
         "first and the last are always run)", "skip at most {0.most_skipped:.0%}"),
    Rule("no such schedule", "layout", lambda a: a.layout.schedule not in names("schedule"),
         "no pipeline schedule {0.layout.schedule!r}", "{0.near_schedule}"),
    Rule("odd pp with two flows", "layout",
         lambda a: bool(a.builder) and a.builder.twice and a.layout.pp % 2 > 0,
         "schedule {0.layout.schedule} needs an even number of ranks, got {0.layout.pp}",
         "add a rank or use {0.layout.schedule}-v"),
    Rule("virtual stages of a fixed schedule", "layout",
         lambda a: bool(a.builder) and not a.builder.free and a.layout.virtual not in (None, a.builder.chunks),
         "schedule {0.layout.schedule} has {0.builder.chunks} chunk(s) per rank, not {0.layout.virtual}",
         "leave it out, or use {0.free_schedules}"),
    Rule("more stages than layers", "layout shape",
         lambda a: bool(a.builder) and a.shape.layers < a.least_layers,
         "schedule {0.layout.schedule} on pp={0.layout.pp} has {0.stages} stages, too many for a model of "
         "{0.shape.layers} layers", "it needs {0.least_layers}, so use fewer ranks, fewer virtual stages or more "
         "layers"),
    Rule("balance without ZeRO-1", "layout shape", lambda a: bool(a.layout.balance) and a.layout.zero != 1,
         "layout.balance = {0.layout.balance!r} needs layout.zero = 1: other stages gather or reduce in every pass, "
         "and ranks run unequal numbers of them", "set layout.zero = 1"),
    Rule("balance with pp", "layout shape", lambda a: bool(a.layout.balance) and a.layout.pp > 1,
         "layout.balance = {0.layout.balance!r} does not go together with pp: stages hand each other passes of one "
         "size", "use pp = 1"),
    Rule("balance with Ulysses", "layout shape", lambda a: bool(a.layout.balance) and a.layout.head_ranks > 1,
         "layout.balance = {0.layout.balance!r} does not go together with Ulysses, which exchanges heads in fixed "
         "groups", "use layout.context = 'zigzag'"),
    Rule("balance with linear attention", "layout shape", lambda a: bool(a.layout.balance) and _linear(a),
         "layout.balance = {0.layout.balance!r} does not go together with linear attention, whose states cross all of "
         "cp", "leave layout.balance out"),
    Rule("latent attention with other kinds", "layout shape",
         lambda a: a.shape.kv_rank > 0 and (_linear(a) or a.shape.qk_norm or a.shape.qkv_bias),
         "model.kv_rank = {0.shape.kv_rank} is softmax attention with norms and projections of its own, and "
         "model.mixer, model.qk_norm and model.qkv_bias are of others", "leave them out, or leave out kv_rank"),
    Rule("window with linear attention", "layout shape",
         lambda a: any(a.shape.mixer_of(i) != "softmax" and a.shape.window_of(i) for i in range(a.shape.layers)),
         "model.window = {0.shape.window} is for softmax attention, and model.mixer = {0.shape.mixer!r} sums up all "
         "that it has seen", "leave one of them out"),
    Rule("balance of documents with balance of experts", "layout shape",
         lambda a: bool(a.layout.balance and a.shape.mixtures and a.shape.balance_loss) and a.shape.balance != "step",
         "layout.balance = {0.layout.balance!r} spreads a document over ranks of its own, and model.balance = "
         "{0.shape.balance!r} counts what each document chose over all of cp", "use model.balance = 'step'"),
    Rule("balance of documents with capacity", "layout shape",
         lambda a: bool(a.layout.balance and a.shape.mixtures and a.shape.capacity),
         "layout.balance = {0.layout.balance!r} spreads a document over ranks of its own, and model.capacity counts "
         "what each document chose over all of cp", "leave one of them out"),
    Rule("balance over all layers with pp", "layout shape",
         lambda a: a.layout.pp > 1 and bool(a.shape.mixtures and a.shape.balance_loss)
         and a.shape.balance == "huggingface",
         "model.balance = 'huggingface' adds up what was chosen in all layers, and pp={0.layout.pp} has these on many "
         "ranks", "use model.balance = 'sequence'"),
    Rule("balance over all layers with weights in files", "shape memory",
         lambda a: a.memory.weights == "file" and bool(a.shape.mixtures and a.shape.balance_loss)
         and a.shape.balance == "huggingface",
         "model.balance = 'huggingface' adds up what was chosen in all layers, and memory.weights = 'file' has one "
         "after the other", "use model.balance = 'sequence'"),
    Rule("experts with compile", "shape train", lambda a: a.train.compile and bool(a.shape.mixtures),
         "train.compile does not go together with model.experts: how many rows each gets is known when it runs only",
         "leave train.compile out"),
    Rule("balance with compile", "layout train", lambda a: bool(a.layout.balance) and a.train.compile,
         "layout.balance = {0.layout.balance!r} does not go together with train.compile: every pass has a length and a "
         "group of its own", "leave out one of them"),
)  # fmt: skip


def links_all(edges: Sequence[tuple[int, int]], count: int) -> bool:
    """Return whether ``edges`` connect all islands ``0`` to ``count - 1``, and name no other island.

    ``edges``: pairs of islands that exchange with each other.
    """
    reached = {0}
    for _ in range(count):
        reached |= {island for edge in edges if reached & {*edge} for island in edge}
    named = {0, *(island for edge in edges for island in edge)}
    return reached == {*range(count)} == named and all(a != b for a, b in edges)


def every_rule() -> list[Rule]:
    """Return a list of all rules against conflicts: those of Weft's core in :data:`RULES`, and those that techniques
    declare.
    """
    declared_rules = [
        rule
        for kind in KINDS
        for technique in declared(kind)
        for rule in technique.rules
    ]
    return [*RULES, *dict.fromkeys(declared_rules)]


def _declared_rules(asked: AskedRecipe) -> Iterator[Rule]:
    """Yield the rules of the techniques that the settings name."""
    for section in vars(asked).values():
        if named := getattr(section, "named", None):
            for technique in named():
                yield from technique.rules
    for declaration, _ in asked_techniques(asked):
        yield from declaration.rules


def refuse_conflicts(asked: AskedRecipe) -> None:
    """Raise :class:`Conflict` for the first rule that the settings ``asked`` break.

    Rules that read settings which ``asked`` does not have are skipped. Two techniques for one phase of a step are
    refused before rules are checked.
    """
    refuse_filled_twice(asked, asked_techniques(asked))
    refuse(asked, (*RULES, *_declared_rules(asked)))
