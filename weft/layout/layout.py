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
            "Data parallel ranks: each has a copy of the model and processes other sequences."
        ),
    )
    shard: int = Field(
        1,
        ge=1,
        description=(
            "Sharded data parallel ranks (ZeRO). Each processes other sequences, and they "
            "divide optimizer state, gradients and parameters among them, as 'zero' says."
        ),
    )
    cp: int = Field(
        1,
        ge=1,
        description="Context parallel ranks, which divide each sequence among them.",
    )
    tp: int = Field(
        1,
        ge=1,
        description="Tensor parallel ranks, which divide every weight matrix among them.",
    )
    tp_shares: tuple[PositiveInt, ...] | Literal["auto"] = Field(
        (),
        description=(
            "Parts of the heads, feed-forward columns and vocabulary that the ranks of tp get, such as [2, 1, 1] (on "
            "the command line tp_shares=2:1:1); each rank gets at least one of each. 'auto': by the memory and speed "
            "that each rank has when it starts. If not set, the parts are equal."
        ),
    )
    sum: str = Field(
        "",
        description=(
            "How ranks of tp that generate add up their parts of a layer's output. 'star': all send to the first rank, "
            "which adds and sends back; 'direct': each sends to all; 'ring': pieces go round; 'two-level': within "
            "hosts first, then between them; 'gloo': the all-reduce of PyTorch. 'auto': whichever is measured as "
            "fastest, for few and for many tokens. Empty: PyTorch's reduce-scatter and all-gather; between these, each "
            "rank computes the norms of its share of the tokens."
        ),
    )
    pp: int = Field(
        1,
        ge=1,
        description="Pipeline parallel ranks, which divide the layers among them.",
    )
    ep: int = Field(
        1,
        ge=1,
        description=(
            "Expert parallel ranks: the existing ranks form groups of this many, and the ranks of "
            "a group divide the experts among themselves, so that no ranks are added. If ep "
            "divides dp x shard x cp, a group consists of neighbouring ranks of dp, shard and cp. "
            "Otherwise ep must be a multiple of tp, and ep / tp must divide that product; a group "
            "then has the ranks of tp too."
        ),
    )
    island: int = Field(
        1,
        ge=1,
        description=(
            "Number of islands: groups of ranks that train on their own and synchronise from "
            "time to time, as [sync] says (docs/explanations/islands.md)."
        ),
    )
    zero: Literal[1, 2, 3] = Field(
        3,
        description=(
            "ZeRO stage of 'shard': 1 divides the optimizer state, 2 also gradients, 3 also "
            "parameters."
        ),
    )
    secondary: int = Field(
        0,
        ge=0,
        description=(
            "With zero = 3: gather parameters for backward from this many neighbouring ranks "
            "only, over fast links (ZeRO++ hpZ). 0: from all ranks of shard and cp."
        ),
    )
    context: str = Field(
        "zigzag",
        description=(
            "Attention across the ranks of cp. 'ring' passes keys and values from rank to "
            "rank; 'zigzag' does, too, and gives each rank an early and a late block of "
            "tokens, so that all have equal work; 'tokenring' passes queries instead; "
            "'gather' fetches all keys and values at once; 'lightseq' lets idle ranks compute"
            " for others; 'ulysses' divides heads instead of tokens; 'rsa' keeps whole rows "
            "of scores (a slow baseline)."
        ),
    )
    ulysses: int = Field(
        1,
        ge=1,
        description=(
            "Number of neighbouring ranks of cp that divide the attention heads among them. "
            "Between such groups 'context' divides the tokens. 1: heads are not divided."
        ),
    )
    scan: Literal["gather", "pass"] = Field(
        "gather",
        description=(
            "How linear attention gets the state of earlier tokens from other ranks of cp: "
            "'gather' exchanges the states of all ranks at once, 'pass' hands a running state"
            " from rank to rank."
        ),
    )
    stage_speeds: tuple[PositiveFloat, ...] = Field(
        (),
        description=(
            "Relative speeds of the ranks of a pipeline, for example [1, 0.5]: slow ranks get fewer layers. If not "
            "set, all ranks count as equally fast."
        ),
    )
    schedule: str = Field(
        "1f1b",
        description=(
            "Pipeline schedule: the order of forward and backward passes on each rank. "
            "'gpipe' runs all forward passes, then all backward passes ('breadth-first': the "
            "same with several stages on a rank); '1f1b' alternates them ('interleaved-1f1b':"
            " with several stages on a rank); 'zb-...' fill waits with weight gradients; "
            "'v-half' and 'v-min' take less memory; 'dualpipe' feeds microbatches from both "
            "ends and stores parameters twice ('dualpipe-v': once). 'weft schedule' lists and"
            " draws all."
        ),
    )
    virtual: int | None = Field(
        None,
        ge=1,
        description=(
            "Pipeline stages on each rank, for schedules that allow several numbers, as "
            "'interleaved-1f1b' and 'breadth-first' do. If not set, it is the schedule's own number."
        ),
    )
    vocab_barriers: Literal[0, 1, 2] = Field(
        0,
        description=(
            "Divide embedding and output layer among all pipeline ranks, which then "
            "synchronise 1 or 2 times in each microbatch. 0: the first stage has the whole "
            "embedding, the last the whole output layer."
        ),
    )
    skip: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "Share of the pipeline stages that each microbatch leaves out, to save time "
            "(SkipPipe). It changes what the model computes. 0: none."
        ),
    )
    overlap: str = Field(
        "",
        description=(
            "What a rank computes while data travels between ranks. During exchanges over tp it computes other "
            "tokens of the same pass: the other half of the sequences ('domino'), the other half of the tokens "
            "('tokens'), or the next chunk of tokens ('chunks'); 'nano' measures which parts in which order are "
            "fastest. During exchanges with experts in a pipeline it computes another microbatch: forward beside "
            "backward ('passes'), or two forward or two backward passes side by side ('pairs'). Empty: nothing."
        ),
    )
    parts: int = Field(
        0,
        ge=0,
        description=(
            "Number of parts into which 'domino', 'tokens', 'chunks' or 'nano' of overlap cut a pass. 1: the pass is "
            "computed whole. 0: the usual number of that kind of overlap."
        ),
    )
    overlap_least: int = Field(
        256,
        ge=0,
        description=(
            "Passes of fewer tokens than this are not cut into parts, because a part's products "
            "would be small. overlap = 'domino', 'tokens', 'chunks' and 'nano' use it."
        ),
    )
    balance: Literal["", "greedy", "flexsp"] = Field(
        "",
        description=(
            "How the documents of a step are divided among data ranks so that all finish "
            "together. 'greedy' gives each document, the longest first, to the ranks that are"
            " free earliest; 'flexsp' chooses groups of ranks by an integer program (needs "
            "scipy). Empty: each rank gets equally many sequences. 'greedy' and 'flexsp' need"
            " zero = 1."
        ),
    )
    dispatch: str = Field(
        "all-to-all",
        description=(
            "How tokens travel to their experts: once for each chosen expert ('all-to-all'), "
            "once to each rank that has any of them ('per-rank'), once to each machine that "
            "has any ('per-node'), within machines and then between them ('two-level'), or "
            "all tokens to all ranks ('all-gather'). 'adaptive' takes what sends the fewest "
            "bytes, 'timed' what is measured as fastest. With 'stay', tokens that are "
            "generated stay on the rank of their experts (elsewhere as 'per-rank')."
        ),
    )
    node: int = Field(
        0,
        ge=0,
        description=(
            "Number of ranks in one machine. The values 'two-level' and 'per-node' of dispatch "
            "need it if ep is above 1, and are refused without it. Nothing else uses it. 0: unknown."
        ),
    )
    pieces: int = Field(
        1,
        ge=0,
        description=(
            "Number of pieces in which tokens are sent to experts, so that one piece travels "
            "while another is computed. 1: all at once. 0: up to 8 pieces, but only so many that "
            "each message has at least 1 MiB."
        ),
    )
    lsh: int = Field(
        0,
        ge=0,
        description=(
            "Replace similar tokens on the way to an expert by their mean, to send less "
            "(LSH-MoE). Tokens are similar if this many random hashes of them agree. It "
            "changes what the model computes. 0: every token is sent."
        ),
    )
    lsh_residual: bool = Field(
        False,
        description=(
            "If lsh is above 0: a token's result is the experts' result for the mean of similar tokens plus the "
            "token's difference from this mean. If false, all similar tokens get the same result."
        ),
    )
    placement: Literal["static", "sharded", "moving"] = Field(
        "static",
        description=(
            "Which ranks compute an expert. 'static': its owner alone; 'sharded': also ranks "
            "with copies of busy experts, made anew for each pass; 'moving': as 'sharded', "
            "and experts also change owners where that pays."
        ),
    )
    spare: int = Field(
        2,
        ge=1,
        description=(
            "Slots on each rank for copies of busy experts, if placement is 'sharded' or "
            "'moving'."
        ),
    )
    order: str = Field(
        "",
        description=(
            "Order in which ranks are numbered along the axes, from the axis over the slowest"
            " links to that over the fastest, such as 'pp dp tp'. Every axis above 1 must be "
            "named. Empty: island pp dp shard cp tp."
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
        """Whether the tokens of one pass are cut in parts, of which one computes while another travels
        (``layout.overlap``).
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
        must divide ``dp * shard * cp``. The ``shard * cp`` ranks that share one state must also fit: ``count`` must
        divide their number, or be a multiple of it.
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
        """Number of neighbouring ``cp`` ranks among which attention divides the heads instead of the tokens."""
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
