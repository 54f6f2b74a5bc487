"""A layout: the number of ranks along each mesh axis, and the named dimension that each axis cuts."""

import re
from collections.abc import Iterator
from math import prod
from typing import Any, Literal, Self

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from weft.errors import UsageError, nearest
from weft.layout.axes import AXES, FOLDED
from weft.refusal import Asked, Rule, refuse
from weft.registry import Registered, check_name, find, names
from weft.section import Section, validated


class Layout(Section):
    """Number of ranks along each mesh axis, and how these ranks work together.

    References: ZeRO (Rajbhandari et al. 2020), ZeRO++ hpZ (Wang et al. 2023; Frontier, Dash et al. 2023). Attention
    schemes are in :mod:`weft.parallel.context.tables`, dispatchers in :mod:`weft.parallel.experts.dispatch`. A layout
    computes what one device computes. There are two exceptions: ``skip`` and ``lsh`` change what the model computes.
    """

    dp: int = Field(
        1,
        ge=1,
        description=(
            "Number of data-parallel replicas, each with a copy of the model. They process different sequences."
        ),
    )
    shard: int = Field(
        1,
        ge=1,
        description=(
            "Number of ranks in sharded data parallelism (ZeRO). They process different sequences, and divide "
            "optimizer state, gradients and parameters among them, as 'zero' says."
        ),
    )
    cp: int = Field(
        1,
        ge=1,
        description=(
            "Number of context-parallel ranks. They divide each sequence among them, so that long sequences fit "
            "into memory."
        ),
    )
    tp: int = Field(
        1,
        ge=1,
        description=(
            "Number of tensor-parallel ranks. They divide the weight matrices among them and compute the same "
            "tokens together."
        ),
    )
    tp_shares: tuple[PositiveInt, ...] | Literal["auto"] = Field(
        (),
        description=(
            "How unequal ranks of tp divide the attention heads, the feed-forward columns and the vocabulary: a "
            "number for each rank, such as [2, 1, 1] for twice as much on the first (on the command line "
            "tp_shares=2:1:1). 'auto': by the memory and speed that each rank has at the start. Empty: equal parts."
        ),
    )
    sum: str = Field(
        "",
        description=(
            "How tp ranks that generate texts add up their parts of a layer's output. 'star': all send to the first "
            "rank, which adds and sends back; 'direct': each sends to all others; 'ring': pieces go round; "
            "'two-level': within each host first, then between hosts; 'gloo': PyTorch's all-reduce; 'auto': what is "
            "measured as fastest. Empty: PyTorch's reduce-scatter and all-gather, as in training."
        ),
    )
    pp: int = Field(
        1,
        ge=1,
        description="Number of pipeline-parallel ranks. They divide the layers among them.",
    )
    ep: int = Field(
        1,
        ge=1,
        description=(
            "Number of expert-parallel ranks, which divide the experts of each layer among them. No ranks are "
            "added: neighbouring ranks of dp, shard and cp form groups of this many. If ep does not divide dp x "
            "shard x cp, groups also take in the ranks of tp, and ep must be a multiple of tp."
        ),
    )
    island: int = Field(
        1,
        ge=1,
        description=(
            "Number of islands: groups of ranks that train apart from each other and synchronise from time to time, "
            "as [sync] says (docs/explanations/islands.md). 1: no islands."
        ),
    )
    zero: Literal[1, 2, 3] = Field(
        3,
        description=(
            "What the ranks of 'shard' divide among them (ZeRO stage). 1: the optimizer state; 2: gradients as "
            "well; 3: parameters as well."
        ),
    )
    secondary: int = Field(
        0,
        ge=0,
        description=(
            "For zero = 3: number of neighbouring ranks that together keep a copy of all parameters after forward, "
            "so that backward gathers them over fast links (ZeRO++ hpZ). This takes more memory. 0: backward "
            "gathers from all ranks of shard and cp."
        ),
    )
    context: str = Field(
        "zigzag",
        description=(
            "Attention across the ranks of cp, each of which holds a part of the tokens. 'ring': keys and values go "
            "from rank to rank; 'zigzag': as 'ring', and each rank has an early and a late block of tokens, for "
            "equal work; 'tokenring': as 'ring', with queries going round; 'gather': all keys and values are "
            "fetched at once; 'lightseq': idle ranks compute for others; 'ulysses': each rank gets all tokens of "
            "some heads; 'rsa': as 'ring', with whole rows of scores in memory (a slow baseline)."
        ),
    )
    ulysses: int = Field(
        1,
        ge=1,
        description=(
            "Number of neighbouring ranks of cp that divide the attention heads among them instead of the tokens. "
            "Tokens are divided between such groups, as 'context' says. 1: heads are not divided."
        ),
    )
    scan: Literal["gather", "pass"] = Field(
        "gather",
        description=(
            "For mixer = 'linear' or 'retention': how linear attention gets the state of earlier tokens from other "
            "ranks of cp. 'gather': all ranks exchange their states at once; 'pass': each rank passes the state on "
            "to the next."
        ),
    )
    stage_speeds: tuple[PositiveFloat, ...] = Field(
        (),
        description=(
            "Relative speeds of the ranks of a pipeline, such as [1, 0.5]: slower ranks get fewer layers. Empty: "
            "all ranks are taken to be equally fast."
        ),
    )
    schedule: str = Field(
        "1f1b",
        description=(
            "Order of forward and backward passes on the ranks of a pipeline. 'gpipe': all forward passes, then all "
            "backward passes ('breadth-first': the same with several stages on a rank); '1f1b': they alternate "
            "('interleaved-1f1b': with several stages on a rank); 'zb-...': weight gradients fill the waits; "
            "'v-half' and 'v-min': less memory; 'dualpipe': microbatches enter at both ends, and parameters are "
            "stored twice ('dualpipe-v': once). 'weft schedule' lists and draws all."
        ),
    )
    virtual: int | None = Field(
        None,
        ge=1,
        description=(
            "Number of pipeline stages on each rank, for schedules that allow several, such as 'interleaved-1f1b' "
            "and 'breadth-first'. More stages mean shorter waits and more messages. If not set: the schedule's own "
            "number."
        ),
    )
    vocab_barriers: Literal[0, 1, 2] = Field(
        0,
        description=(
            "Divide the embedding and the output layer among all pipeline ranks, which then wait for each other 1 "
            "or 2 times per microbatch. 0: the first stage has the whole embedding, the last stage the whole output "
            "layer."
        ),
    )
    skip: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Share of the pipeline stages that each microbatch skips, to save time (SkipPipe). This changes what "
            "the model computes. 0: it skips none."
        ),
    )
    overlap: str = Field(
        "",
        description=(
            "What a rank computes while data travel between ranks. While ranks of tp exchange: the other half of "
            "the pass's sequences ('domino'), the other half of its tokens ('tokens'), its next chunk of tokens "
            "('chunks'), or parts in the order that is measured as fastest ('nano'). While tokens travel to experts "
            "in a pipeline: a pass of another microbatch in the other direction ('passes') or in the same direction "
            "('pairs'). Empty: nothing."
        ),
    )
    parts: int = Field(
        0,
        ge=0,
        description=(
            "Number of parts into which overlap = 'domino', 'tokens', 'chunks' or 'nano' cuts the tokens of a pass. "
            "1: it is not cut. 0: the usual number for that kind of overlap."
        ),
    )
    overlap_least: int = Field(
        256,
        ge=0,
        description=(
            "Smallest number of tokens of a pass that overlap = 'domino', 'tokens', 'chunks' or 'nano' cuts into "
            "parts. The parts of a shorter pass would be too small to compute efficiently."
        ),
    )
    balance: Literal["", "greedy", "flexsp"] = Field(
        "",
        description=(
            "How the documents of a step are divided among data ranks so that all finish at the same time. "
            "'greedy': the longest document first, each to the ranks that are free earliest; 'flexsp': groups of "
            "ranks by an integer program (needs scipy). Empty: each rank gets equally many sequences. 'greedy' and "
            "'flexsp' need zero = 1."
        ),
    )
    dispatch: str = Field(
        "all-to-all",
        description=(
            "How tokens travel to their experts on other ranks. 'all-to-all': once for each chosen expert; "
            "'per-rank': once to each rank that has any of them; 'per-node': once to each machine that has any; "
            "'two-level': within machines, then between them; 'all-gather': all tokens to all ranks; 'adaptive': "
            "whichever sends the fewest bytes; 'timed': whichever is measured as fastest; 'stay': generated tokens "
            "remain on the rank of their experts (in training as 'per-rank')."
        ),
    )
    node: int = Field(
        0,
        ge=0,
        description=(
            "Number of ranks on one machine. dispatch = 'two-level' and 'per-node' need it if ep is above 1; "
            "nothing else uses it. 0: not known."
        ),
    )
    pieces: int = Field(
        1,
        ge=0,
        description=(
            "Number of pieces in which tokens are sent to experts, so that one piece is computed while the next "
            "travels. 1: all at once. 0: as many as leave at least 1 MiB for each message, at most 8."
        ),
    )
    lsh: int = Field(
        0,
        ge=0,
        description=(
            "Send similar tokens for the same expert as one, their mean, to send less (LSH-MoE): tokens are similar "
            "if this many random hashes of them agree. More hashes merge fewer tokens. Only in training; it changes "
            "what the model computes. 0: every token is sent."
        ),
    )
    lsh_residual: bool = Field(
        False,
        description=(
            "For 'lsh' above 0: whether the difference between a token and the mean that was sent for it is added "
            "to the experts' result for this mean. If false, all similar tokens get the same result."
        ),
    )
    placement: Literal["static", "sharded", "moving"] = Field(
        "static",
        description=(
            "Which ranks compute an expert. 'static': the rank that owns it; 'sharded': also ranks with copies of "
            "busy experts, which are made anew for each pass; 'moving': as 'sharded', and experts also change their "
            "owner where this saves time."
        ),
    )
    spare: int = Field(
        2,
        ge=1,
        description=(
            "For placement = 'sharded' and 'moving': number of other ranks' experts of which each rank can hold "
            "a copy, in each layer."
        ),
    )
    order: str = Field(
        "",
        description=(
            "Order of the axes in the numbering of ranks, from the one over the slowest links to the one over the "
            "fastest, such as 'pp dp tp'. Every axis above 1 must be named. Empty: island pp dp shard cp tp."
        ),
    )

    @field_validator("tp_shares", mode="before")
    @classmethod
    def _shares(cls, value: Any) -> Any:
        if value == ():
            return value
        from weft.layout.shares import read_shares

        return read_shares(value)

    @field_validator("context", "dispatch", "overlap", "sum")
    @classmethod
    def _is_known(cls, name: str, info: ValidationInfo) -> str:
        check_name(info.field_name or "", name)
        return name

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        named = self._named_axes
        if unknown := [name for name in named if name not in AXES]:
            raise ValueError(
                f"unknown axis {unknown[0]!r} in the order; {nearest(unknown[0], AXES)}"
            )
        if len(set(named)) < len(named):
            raise ValueError("an axis is twice in the order")
        if named and (
            missing := [
                axis for axis in AXES if self.size(axis) > 1 and axis not in named
            ]
        ):
            raise ValueError(
                f"the order leaves out {missing[0]}, which is {self.size(missing[0])}"
            )
        return self

    @model_validator(mode="after")
    def _together(self) -> Self:
        refuse(AskedLayout(layout=self), LAYOUT_RULES)
        return self

    @property
    def _named_axes(self) -> list[str]:
        return re.findall(r"\w+", self.order)

    def named(self) -> Iterator[Registered]:
        """Yield the registered schedule, attention scheme, dispatcher and kind of overlap that this layout uses.

        Only those are used whose axis (``pp``, ``cp``, ``ep``, and ``tp`` or ``ep``) has more than one rank.
        """
        uses = {
            "schedule": (self.schedule, self.pp),
            "context": (self.context, self.cp),
            "dispatch": (self.dispatch, self.ep),
            "overlap": (self.overlap, max(self.tp, self.ep)),
        }
        for kind, (name, ranks) in uses.items():
            if ranks > 1 and name in names(kind):
                yield find(kind, name)

    @property
    def takes_turns(self) -> bool:
        """Whether forward and backward passes of two microbatches alternate, so that one computes while the other's
        tokens travel.

        The tokens travel to experts on other ranks and back (``layout.overlap``).
        """
        return self.overlap in ("passes", "pairs")

    @property
    def weaves(self) -> bool:
        """Whether the tokens of one pass are cut in parts, so that one part computes while the sums of another part
        travel (``layout.overlap``).
        """
        return bool(self.overlap) and not self.takes_turns

    @property
    def axis_order(self) -> tuple[str, ...]:
        """All axes from the slowest-varying to the fastest in the numbering of ranks.

        Axes that ``order`` does not name come first.
        """
        named = self._named_axes
        return (*(axis for axis in AXES if axis not in named), *named)

    def size(self, *axes: str) -> int:
        """Return the product of the numbers of ranks along ``axes``.

        ``ep`` counts only the data ranks over which experts are spread, even if they are spread over the ranks of
        ``tp`` too.
        """
        return prod(
            self.fold if axis == FOLDED else getattr(self, axis) for axis in axes
        )

    def folds(self, count: int) -> bool:
        """Return whether the experts of a layer can be divided among groups of ``count`` neighbouring data ranks.

        The data ranks are those of ``dp``, ``shard`` and ``cp``. They must be divisible into such groups, so ``count``
        must divide ``dp * shard * cp``. Also ``count`` must divide ``shard * cp``, the number of ranks that share one
        state, or be a multiple of it.
        """
        state, data = self.size("shard", "cp"), self.size("dp", "shard", "cp")
        return data % count == 0 and (state % count == 0 or count % state == 0)

    @property
    def folds_tp(self) -> bool:
        """Whether experts are spread over the ranks of ``tp`` as well."""
        return (
            not self.folds(self.ep)
            and self.ep % self.tp == 0
            and self.folds(self.ep // self.tp)
        )

    @property
    def fold(self) -> int:
        """Number of data ranks over which experts are spread: ``ep``, divided by ``tp`` if :attr:`folds_tp`."""
        return self.ep // self.tp if self.folds_tp else self.ep

    @property
    def world(self) -> int:
        """Number of ranks of all islands together."""
        return self.size(*AXES)

    @property
    def inside(self) -> Self:
        """Layout of a single island: this layout with ``island = 1``."""
        order = " ".join(axis for axis in self.axis_order if axis != "island")
        return self.model_copy(
            update={"island": 1, "order": order if self.order else ""}
        )

    @property
    def head_ranks(self) -> int:
        """Number of neighbouring ``cp`` ranks among which attention divides the heads instead of the tokens (Ulysses);
        1: none.
        """
        return self.cp if self.context == "ulysses" else min(self.ulysses, self.cp)

    @classmethod
    def parse(cls, text: str, base: dict[str, Any] | None = None) -> Self:
        """Read a layout such as ``"shard=2,tp=2"``. Axes that are not named have size 1.

        ``base``: values of fields by name. They hold for settings, such as ``schedule``, that ``text`` does not name.
        Only sizes of axes and ``order`` are never taken from ``base``. None: fields have their defaults. Raises
        :class:`UsageError` for an unknown axis, an axis that is named twice, or a value that is no number.
        """
        values: dict[str, Any] = {
            k: v for k, v in (base or {}).items() if k not in (*AXES, FOLDED, "order")
        }
        said: set[str] = set()
        for item in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = (part.strip() for part in item.partition("="))
            if name not in cls.model_fields:
                raise UsageError(
                    f"layout {text!r}: unknown axis {name!r}; {nearest(name, cls.model_fields)}"
                )
            if not equals:
                raise UsageError(
                    f"layout {text!r}: {item!r} is not of the form axis=number"
                )
            if name in said:
                raise UsageError(f"layout {text!r}: {name} is there twice; say it once")
            said.add(name)
            # pydantic reads the fractions
            values[name] = int(value) if value.lstrip("-").isdigit() else value
        return validated(cls, values, f"layout {text!r}")

    def __str__(self) -> str:
        sizes = {axis: getattr(self, axis) for axis in (*AXES, FOLDED)}
        axes = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
        return ",".join(axes) or "one device"


class AskedLayout(Asked):
    """The layout of a recipe, with values that the checks of layouts (:data:`LAYOUT_RULES`) use.

    Most of these values are texts and lists for error messages. ``layout``: the recipe's layout.
    """

    layout: Layout

    @property
    def nearby(self) -> str:
        """Advice for an impossible ``layout.secondary``: a text that lists its possible values."""
        state = self.layout.size("shard", "cp")
        fit = [n for n in range(2, state) if state % n == 0]
        return f"use one of {', '.join(map(str, fit))}" if fit else "leave it out"

    @property
    def folding(self) -> list[int]:
        """Possible values of ``layout.ep``, for an error line: numbers of data ranks among which experts can be
        divided, and these numbers times ``tp``.
        """
        numbers = range(1, self.layout.size("dp", "shard", "cp") + 1)
        data = list(filter(self.layout.folds, numbers))
        return sorted({*data, *(self.layout.tp * n for n in data)})

    @property
    def share_count(self) -> int:
        return len(self.layout.tp_shares)

    @property
    def foldable(self) -> str:
        return f"use one of {', '.join(map(str, self.folding))}"


#: Refused combinations of fields of a layout, whatever model it lays out.
LAYOUT_RULES: tuple[Rule[AskedLayout], ...] = (
    Rule("secondary without ZeRO-3", "layout", lambda a: a.layout.secondary > 0 and a.layout.zero != 3,
         "secondary = {0.layout.secondary} is about what zero = 3 gathers for backward, and zero = {0.layout.zero} "
         "gathers once a step", "use zero = 3 or leave secondary out"),
    Rule("secondary that does not divide", "layout",
         lambda a: a.layout.secondary > 0
         and (a.layout.size("shard", "cp") % a.layout.secondary > 0
              or not 1 < a.layout.secondary < a.layout.size("shard", "cp")),
         "secondary = {0.layout.secondary} does not cut the ranks of shard={0.layout.shard} x cp={0.layout.cp} into "
         "groups", "{0.nearby}"),
    Rule("experts that do not fold", "layout", lambda a: a.layout.ep > 1 and a.layout.ep not in a.folding,
         "ep = {0.layout.ep} does not fold over the ranks of dp={0.layout.dp}, shard={0.layout.shard}, "
         "cp={0.layout.cp}, tp={0.layout.tp}", "{0.foldable}"),
    Rule("islands with balance", "layout", lambda a: a.layout.island > 1 and bool(a.layout.balance),
         "layout.balance = {0.layout.balance!r} places a step's documents on all ranks, and islands step by themselves",
         "leave one of them out"),
    Rule("placement without ep", "layout", lambda a: a.layout.ep == 1 and a.layout.placement != "static",
         "placement = {0.layout.placement!r} is about experts that ep spreads over ranks", "set ep, or leave it out"),
    Rule("moving experts with shared state", "layout",
         lambda a: a.layout.placement == "moving" and a.layout.size("shard", "cp") > a.layout.fold,
         "placement = 'moving' lets owners swap experts, and with ep = {0.layout.ep} each is owned by several of "
         "shard={0.layout.shard} x cp={0.layout.cp}", "use placement = 'sharded', more ep, or dp for shard"),
    Rule("ep with secondary", "layout", lambda a: a.layout.ep > 1 and a.layout.secondary > 0,
         "layout.secondary = {0.layout.secondary} is about neighbours that share all state, and with ep = "
         "{0.layout.ep} they have other experts", "leave out one of them"),
    Rule("means of tokens that go nowhere", "layout",
         lambda a: (a.layout.lsh > 0 and a.layout.ep == 1) or (a.layout.lsh_residual and not a.layout.lsh),
         "layout.lsh and lsh_residual are about tokens that travel as means, and lsh = {0.layout.lsh} with "
         "ep = {0.layout.ep} sends none", "set ep and lsh, or leave them out"),
    Rule("overlap with other tables", "layout",
         lambda a: bool(a.layout.takes_turns and (a.layout.skip or a.layout.vocab_barriers)),
         "layout.overlap cuts a schedule of its own, and layout.skip and layout.vocab_barriers bring others",
         "leave one of them out"),
    Rule("overlap of sharded parameters", "layout",
         lambda a: a.layout.takes_turns and a.layout.zero == 3 and a.layout.size("shard", "cp") > 1,
         "layout.overlap = {0.layout.overlap!r} goes to and fro between layers, whose parameters layout.zero = 3 would "
         "gather each time", "set layout.zero = 2"),
    Rule("overlap over one rank", "layout",
         lambda a: a.layout.weaves and a.layout.tp == 1 and a.layout.ep == 1,
         "layout.overlap = {0.layout.overlap!r} computes while tokens travel over tp, which is 1, or to experts",
         "set layout.tp or layout.ep, or leave it out"),
    Rule("parts without overlap", "layout", lambda a: a.layout.parts > 0 and not a.layout.weaves,
         "layout.parts = {0.layout.parts} is about the parts of a pass that layout.overlap makes",
         "set layout.overlap, or leave it out"),
    Rule("shares of other ranks", "layout",
         lambda a: a.layout.tp_shares != "auto" and len(a.layout.tp_shares) not in (0, a.layout.tp),
         "tp_shares has {0.share_count} shares, and tp = {0.layout.tp}", "give one for each rank of tp"),
    Rule("speeds of other stages", "layout",
         lambda a: len(a.layout.stage_speeds) not in (0, a.layout.pp if a.layout.pp > 1 else 0),
         "layout.stage_speeds = {0.layout.stage_speeds} is about ranks of a pipeline, and pp = {0.layout.pp}",
         "give one for each rank of pp"),
    Rule("tp settings without tp", "layout",
         lambda a: a.layout.tp == 1 and bool(a.layout.tp_shares or a.layout.sum),
         "tp_shares and sum are about ranks of tp, and tp = 1", "set tp, or leave them out"),
)  # fmt: skip
