"""Random layouts and features compared with one device, for ``weft verify --random``.

Every case is the recipe with small sizes and drawn settings, exactly as its command line would make it.
``random_cases.toml`` has the values that can be drawn. A refusal is right only if the table of conflicts has it.
"""

import json
import random
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import UsageError, WeftError
from weft.layout.axes import LIVE_AXES
from weft.layout.layout import AskedLayout, Layout
from weft.layout.mesh import Mesh
from weft.prove.equality import compare_with_one_device, run_layout
from weft.prove.pool import ProcessPool
from weft.recipe import Recipe, load_recipe
from weft.recipe.host_section import HostSection
from weft.recipe.toml import read_toml
from weft.refusal import Conflict
from weft.registry import KINDS, declared, find, names
from weft.train.setup import prepare

#: Settings of one case by their full names, of those that were drawn.
Case = dict[str, Any]

AXES = ("island", *LIVE_AXES)
FOLDER = Path(tempfile.gettempdir()) / "weft-verify-random"
TABLES = read_toml(Path(__file__).with_name("random_cases.toml"))


def _order(case: Case, rng: random.Random) -> str:
    axes = [axis for axis in AXES if case.get(f"layout.{axis}", 1) > 1]
    rng.shuffle(axes)
    return " ".join(axes)


#: Returns the values that a setting may take, for a recipe and the settings drawn before; none: it is not drawn.
Choices = Callable[[Recipe, Case, random.Random], list[Any]]


def _choices(given: Any) -> Choices:
    """Return the choices of a setting in the file."""
    if isinstance(given, list):
        given = {"values": given}

    def choices(recipe: Recipe, case: Case, rng: random.Random) -> list[Any]:
        after = given.get("after")
        if after and (
            after not in case or given.get("equal", case[after]) != case[after]
        ):
            return []
        if "experts" in given and not _experts(recipe, case):
            return []
        return list(given["values"])

    return choices


def _if(condition: Callable[[Recipe, Case], object], *values: Any) -> Choices:
    return lambda recipe, case, rng: list(values) if condition(recipe, case) else []


def _beside_dense(value: int) -> Choices:
    """Allow a value where layers with experts are left."""
    return _if(
        lambda recipe, case: _experts(recipe, case) and case.get("model.layers", 4) > 1,
        value,
    )


def _names_after(setting: str, kind: str) -> Choices:
    """Allow all techniques of a kind where ``setting`` has been drawn."""
    return lambda recipe, case, rng: names(kind) if setting in case else []


def _experts(recipe: Recipe, case: Case) -> int:
    """Return the least number of experts of a layer with experts; 0 if there is none."""
    given = case.get("model.experts", recipe.model.experts)
    return (
        min(filter(None, given), default=0)
        if isinstance(given, Sequence)
        else int(given)
    )


def _folding(recipe: Recipe, case: Case, rng: random.Random) -> list[int]:
    """Allow the sizes that ``ep`` can have."""
    layout = Layout(**{axis: case.get(f"layout.{axis}", 1) for axis in AXES})
    return [
        n for n in AskedLayout(layout=layout).folding if 1 < n <= _experts(recipe, case)
    ]


def _dispatchers(recipe: Recipe, case: Case, rng: random.Random) -> list[str]:
    """Allow all dispatchers, but those that know nodes only where ``layout.node`` is drawn."""
    if not _experts(recipe, case):
        return []
    ways = declared("dispatch")
    return [
        w.name for w in ways if not w.implementation.by_node or "layout.node" in case
    ]


def _targets(recipe: Recipe, case: Case, rng: random.Random) -> list[list[str]]:
    """Allow patterns of weights that this model has."""
    latent = bool(case.get("model.kv_rank", recipe.model.kv_rank))
    plain = [] if latent else [["wq"], ["k_proj"]]
    dense = [] if latent or _experts(recipe, case) else [["wq", "down"]]
    return [["blocks.0.*"], *plain, *dense] if "adapter.kind" in case else []


def _if_plain(*values: Any) -> Choices:
    """Allow values where attention has only settings that latent attention can have."""

    def plain(recipe: Recipe, case: Case) -> bool:
        model = recipe.model
        return (
            not case.get("model.qk_norm", model.qk_norm)
            and not case.get("model.qkv_bias", model.qkv_bias)
            # other targets may have no weight
            and case.get("adapter.targets", ["blocks.0.*"]) == ["blocks.0.*"]
            and case.get("model.mixer", model.mixer) == "softmax"
        )

    return _if(plain, *values)


def _plain_replicas(case: Case) -> bool:
    """Return whether ranks are replicas, with all that belongs to them on the device."""
    cut = {f"layout.{axis}" for axis in AXES if axis != "dp"}
    other = ("model.experts", "memory.", "layout.balance", "optimizer.estimate")
    others = any(name in cut or name.startswith(other) for name in case)
    return "layout.dp" in case and not others


def _sync_method(case: Case) -> Any:
    """Return the class of the case's sync method."""
    return find("sync", (SMALL | case)["sync.update"]).implementation


def _learns_texts(recipe: Recipe, case: Case) -> bool:
    """Return whether the recipe learns from texts, of which a case may have several sources."""
    return not (recipe.loss.of_pairs or recipe.rl)


def _drawn_mixtures() -> list[str]:
    """Return the mixtures whose settings can be drawn; those that measure losses need more than the first steps."""
    return [each.name for each in declared("mixture") if each.draws]


def _named(kind: str) -> Choices:
    """Allow all techniques of a kind, with those of the recipe's plugins."""
    return lambda recipe, case, rng: names(kind)


def _of_techniques(recipe: Recipe, case: Case) -> dict[str, list[Any]]:
    """Return the draws of the settings of every technique that a case names."""
    values: dict[str, list[Any]] = {}
    for name in type(recipe).model_fields:
        section = getattr(recipe, name)
        if not isinstance(section, HostSection):
            continue
        for field_name, kind in section.hosts.items():
            key = f"{name}.{field_name}"
            asked = (SMALL | case).get(key, getattr(section, field_name))
            if asked in names(kind):
                for setting, drawn in find(kind, asked).draws.items():
                    values[f"{name}.{setting}"] = list(drawn)
    return values


def _overlaps(recipe: Recipe, case: Case, rng: random.Random) -> list[str]:
    """Return the kinds of overlap that have something to hide in a case."""
    travel = "layout.tp" in case or "layout.ep" in case
    turns = (
        _experts(recipe, case)
        and "layout.pp" in case
        and case.get("layout.zero", 3) < 3
    )
    return [
        *(names("overlap") if travel else ()),
        *(("passes", "pairs") if turns else ()),
    ]


#: Choices that the file leaves to code.
BY_CODE: dict[str, Choices] = {
    "layout.ep": _folding,
    "layout.dispatch": _dispatchers,
    "sync.update": lambda recipe, case, rng: (
        [name for name in names("sync") if name != SMALL["sync.update"]]
        if "layout.island" in case
        else []
    ),
    "sync.partner": _if(
        lambda recipe, case: (
            "layout.island" in case and len(_sync_method(case).partners) > 1
        ),
        "ring",
        "pairs",
        "graph",
    ),
    "sync.graph": lambda recipe, case, rng: (
        [[[rng.randrange(i), i] for i in range(1, case["layout.island"])]]
        if case.get("sync.partner") == "graph"
        else []
    ),
    "sync.fragments": _if(lambda recipe, case: _sync_method(case).in_fragments, 2, 3),
    "sync.delay": _if(
        lambda recipe, case: {"sync.fragments", "sync.every"} <= {*case}, 1
    ),
    "layout.order": lambda recipe, case, rng: [_order(case, rng)],
    "layout.tp_shares": lambda recipe, case, rng: (
        [":".join(str(rng.randint(1, 3)) for _ in range(case["layout.tp"]))]
        if "layout.tp" in case
        else []
    ),
    "layout.context": lambda recipe, case, rng: (
        KINDS["context"].choices(names("context")) if "layout.cp" in case else []
    ),
    "layout.schedule": _names_after("layout.pp", "schedule"),
    "layout.overlap": _overlaps,
    "layout.parts": _if(
        lambda recipe, case: case.get("layout.overlap") in names("overlap"), 1, 2, 3
    ),
    "optimizer.kind": _named("optimizer"),
    "optimizer.state": lambda recipe, case, rng: (
        names("moments") if "optimizer.kind" not in case else []
    ),
    "adapter.whole": _if(
        lambda recipe, case: "adapter.kind" in case and "adapter.tokens" not in case,
        ["embed_tokens"],
    ),
    "train.freeze": _if(
        lambda recipe, case: not recipe.adapter and "adapter.kind" not in case,
        ["norm.*"],
        ["blocks.0.*", "embed*"],
    ),
    "data.seq_len": lambda recipe, case, rng: (
        [40, 48, 57, 64] if recipe.loss.of_pairs or recipe.rl else [1, 2, 7, 33]
    ),
    "data.mix": _if(_learns_texts, *_drawn_mixtures()),
    "data.mix_by": _if(_learns_texts, "weighting"),
    "rl.method": _if(lambda recipe, case: recipe.rl, *names("policy-loss")),
    "roles.critic.trunk": _if(
        lambda recipe, case: recipe.rl and case.get("rl.method") == "ppo", "own"
    ),
    "rl.loss.normaliser": _if(
        lambda recipe, case: recipe.rl, "tokens", "constant", "sequence"
    ),
    "rl.loss.ratio": _if(
        lambda recipe, case: recipe.rl, "token", "sequence", "product"
    ),
    "rl.loss.entropy": _if(lambda recipe, case: recipe.rl, 0.1),
    "model.first_dense": _beside_dense(1),
    "model.moe_every": _beside_dense(2),
    "model.router_groups": _if(
        lambda recipe, case: _experts(recipe, case) in (6, 8), 2
    ),
    "adapter.targets": _targets,
    "model.small_ffn": _if(
        lambda recipe, case: (
            not _experts(recipe, case)
            and not recipe.rl
            and not recipe.adapter
            and "adapter.kind" not in case
            and not recipe.model.origin
        ),
        5,
    ),
    "model.ladder_from": _if(
        lambda recipe, case: (
            "model.residual" in case and case.get("model.layers", 4) > 1
        ),
        1,
    ),
    "model.kv_rank": _if_plain(5),
    "resilience.code": lambda recipe, case, rng: (
        names("code") if _plain_replicas(case) else []
    ),
}

#: The settings that can be drawn, in this order.
DRAWN: dict[str, Choices] = {
    name: BY_CODE[name] if given == "code" else _choices(given)
    for name, given in TABLES["drawn"].items()
}

#: Probability of drawing a setting where it can be drawn.
OFTEN: dict[str, float] = TABLES["often"]
SELDOM = 0.3

#: Settings that a case starts from.
SMALL: Case = TABLES["small"] | {
    "data.cache": str(FOLDER / "cache"),
    "data.sources": str(FOLDER / "corpus.jsonl"),
    "memory.folder": str(FOLDER),
}

#: Settings that a case starts from if the recipe learns from pairs of answers; a row holds the longest pair.
PAIRS: Case = {
    "data.path": str(FOLDER / "pairs.jsonl"),
    "data.form": "auto",
    "data.seq_len": 48,
}


#: Settings that a case starts from if the recipe learns from images: no patch divides them, and gates are open.
PICTURES: Case = {
    "data.path": str(FOLDER / "pictures"),
    "model.kv_heads": None,
    "model.settings.zero": False,
    "model.settings.drop": 0.3,
}

#: The same if it learns from videos.
VIDEOS: Case = PICTURES | {
    "data.path": str(FOLDER / "videos"),
    "data.settings.frames": 3,
    "data.settings.every": 1,
}

#: Beginnings of the names of settings that are not drawn for images, which have no tokens. Of ``model`` only
#: :data:`OF_PICTURES` are.
OF_TOKENS = ("data.", "model.", "adapter.tokens", "adapter.whole", "train.freeze")
OF_PICTURES = (
    "model.heads",
    "model.ffn",
    "model.embed",
    "model.layers",
    "model.qk_norm",
)


#: Beginnings of the names of settings that are not drawn for a recipe with ``model.small_ffn``, which has dense layers.
OF_OTHER_LAYERS = ("adapter.", "model.experts")


#: Settings that a case starts from if the recipe learns from rewards: every batch that is drawn divides a phase. The
#: questions are those of the recipe's tasks.
REWARDS: Case = {
    "rl.group": 2, "rl.batch": 35, "data.seq_len": 48, "data.sources": None,
}  # fmt: skip


@dataclass(frozen=True)
class CaseResult:
    """The result of a random case: whether a layout of a recipe computes the same as one device.

    ``kind``: "equal", "refused", "wrong", "crashed" or "hung". ``why``: the rule that refuses the case, the figures
    that differ, or the error.
    """

    kind: str
    why: str


@dataclass
class Summary:
    """The outcome of a campaign of random cases.

    ``counts``: number of cases by kind of result, such as "equal" or "wrong". ``cases``: one dictionary for each failed
    case, with the keys ``kind`` (of the result), ``why`` and ``command`` (a command line that repeats the case). The
    case has been shrunk to the settings that the failure needs.
    """

    counts: Counter[str] = field(default_factory=Counter)
    cases: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        kinds = ("equal", "refused", "wrong", "crashed", "hung")
        return {
            "tried": self.counts.total(),
            **{k: self.counts[k] for k in kinds},
            "cases": self.cases,
        }


def draw_case(recipe: Recipe, rng: random.Random, ranks: int) -> Case:
    """Draw a random case for ``recipe``: sizes of the mesh axes for at most ``ranks`` ranks, and some other settings.

    ``rng``: source of the random numbers. The same numbers give the same case.
    """
    case: Case = dict(PAIRS) if recipe.loss.of_pairs else {}
    case |= REWARDS if recipe.rl else {}
    pictures = recipe.model.kind == "diffusion"
    if pictures:
        case |= VIDEOS if recipe.data.sources[0].kind == "videos" else PICTURES
    left = rng.randint(2, ranks)
    for axis in rng.sample(AXES, len(AXES)):
        size = rng.choice([n for n in (1, 1, 2, 2, 3, 4) if n <= left])
        if size > 1:
            case[f"layout.{axis}"], left = size, left // size
    for name, values in DRAWN.items():
        if pictures and name.startswith(OF_TOKENS) and name not in OF_PICTURES:
            continue
        if recipe.model.small_ffn and name.startswith(OF_OTHER_LAYERS):
            continue
        choices = values(recipe, case, rng)
        if choices and rng.random() < OFTEN.get(name, SELDOM):
            case[name] = rng.choice(choices)
    for name, drawn in _of_techniques(recipe, case).items():
        case[name] = rng.choice(drawn)
    return case


def command_options(case: Case, fixed: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Return the command-line options of a case: the value of ``--layout``, and the values of each ``--set``.

    ``fixed``: texts ``section.key=value`` that hold in every case, whatever was drawn.
    """
    kept = {text.partition("=")[0].strip() for text in fixed}
    small = SMALL
    if any(name.startswith("memory.") for name in kept):
        # what is asked about memory is asked of the recipe's own
        small = {k: v for k, v in SMALL.items() if k == "memory.folder" or not k.startswith("memory.")}  # fmt: skip
    settings = {key: v for key, v in (small | case).items() if key not in kept}
    if "data.path" in case:
        settings.pop("data.sources", None)
    layout, sets = [], []
    for name, value in settings.items():
        if value is None:  # left to the recipe
            continue
        if name.startswith("layout."):
            layout.append(f"{name.removeprefix('layout.')}={value}")
        elif name == "data.sources":
            more = [str(FOLDER / "few.jsonl")] if _mixes(SMALL | case) else []
            paths = [value, *more]
            listed = [{"kind": "jsonl", "path": path} for path in paths]
            sets.append(f"{name}={_in_toml(listed)}")
        else:
            sets.append(f"{name}={_in_toml(value)}")
    return ",".join(layout), [*sets, *fixed]


def _mixes(case: Case) -> bool:
    """Return whether a case has several sources, because it mixes them in a way of its own."""
    return (case["data.mix"], case["data.mix_by"]) != ("static", "sampling")


def _in_toml(value: Any) -> str:
    """Return a value as TOML, in which tables have other signs than in JSON."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}={_in_toml(of)}' for key, of in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_in_toml, value))}]"
    return json.dumps(value)


def _without(case: Case, name: str) -> Case:
    """Return ``case`` without a setting, nor its axis in the order of axes."""
    smaller = {key: value for key, value in case.items() if key != name}
    if "layout.order" in smaller:
        axes = smaller["layout.order"].split()
        left = (axis for axis in axes if f"layout.{axis}" in smaller)
        smaller["layout.order"] = " ".join(left)
    return smaller


def command_of(
    path: Path, case: Case, dtype: str, steps: int, fixed: Sequence[str] = ()
) -> str:
    """Return the command line of ``weft verify`` that repeats ``case`` with the recipe file ``path``.

    ``dtype``: type of the computation; ``steps``: number of training steps; ``fixed``: as in :func:`command_options`.
    """
    layout, sets = command_options(case, fixed)
    more = [word for text in sets for word in ("--set", text)]
    options = ["--layout", layout, *more, "--dtype", dtype, "--steps", str(steps)]
    return shlex.join(["weft", "verify", str(path), *options])


def write_corpus() -> None:
    """Write documents of very unequal lengths and pairs of answers, the same in every campaign, to the folder
    :data:`FOLDER`, as training data of the cases.
    """
    rng = random.Random(0)
    FOLDER.mkdir(exist_ok=True)

    def text(*lengths: int) -> str:
        return "".join(rng.choice("abcdefgh \n") for _ in range(rng.choice(lengths)))

    documents = [{"text": text(1, 2, 3, 5, 8, 13, 21, 34, 55)} for _ in range(60)]
    answers = ("prompt", "chosen", "rejected")
    pairs = [
        {name: rng.choice("abcdefgh") + text(0, 1, 4) for name in answers}
        for _ in range(60)
    ]
    few = [{"text": text(2, 13, 34)} for _ in range(9)]
    for name, rows in ("corpus", documents), ("pairs", pairs), ("few", few):
        path = FOLDER / f"{name}.jsonl"
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        if not path.exists() or path.read_text() != lines:
            path.write_text(lines)


def write_pictures() -> None:
    """Write nine grey images of two classes, and videos of two classes, to :data:`FOLDER`; they are the same every
    time.
    """
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(9):
        path = FOLDER / "pictures" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (5, 6)).astype(np.uint8)).save(path)
        video = FOLDER / "videos" / "ab"[number % 2] / f"{number}.npy"
        video.parent.mkdir(parents=True, exist_ok=True)
        np.save(video, rng.integers(0, 256, (3, 5, 6)).astype(np.uint8))


def compare_layout(recipe: Recipe, steps: int) -> dict[str, Any] | None:
    """Compare the layout of ``recipe`` with one device over ``steps`` training steps, on the CPU. All ranks must call
    it.

    Returns the fields of :class:`Difference` on rank 0, and None on all other ranks.
    """
    mesh, job = Mesh.create(recipe.layout, "cpu"), prepare(recipe)
    difference = compare_with_one_device(run_layout(job, mesh, steps), job, mesh)
    return asdict(difference) if difference else None


@dataclass(frozen=True)
class Fuzzer:
    """Runs random cases of the recipe file ``path`` in a pool of processes, and compares each with one device.

    ``dtype``: type of the computation; ``steps``: training steps of each case; ``limit``: seconds after which a case
    counts as hung; ``fixed``: texts ``section.key=value`` that hold in every case, whatever is drawn.
    """

    path: Path
    pool: ProcessPool
    dtype: str = "float64"
    steps: int = 2
    limit: float = 60
    fixed: Sequence[str] = ()

    def verdict_of(self, case: Case) -> CaseResult:
        """Run ``case`` on the ranks of its layout, and return the result; errors of the case become a result too."""
        layout, sets = command_options(case, self.fixed)
        try:
            recipe = load_recipe(
                self.path, [*sets, f'train.dtype="{self.dtype}"'], layout, quiet=True
            )
            prepare(recipe)
            world, limit = recipe.layout.world, self.limit
            ranks = self.pool.run(
                world, compare_layout, recipe, self.steps, timeout=limit
            )
        except Conflict as refusal:
            return CaseResult("refused", refusal.rule)
        except TimeoutError as error:
            return CaseResult("hung", str(error))
        except Exception as error:  # whatever it is, it is what the campaign is for
            refused = isinstance(error, UsageError | WeftError)
            label = "refused outside the table: " * refused
            return CaseResult("crashed", f"{label}{type(error).__name__}: {error}")
        equal = ranks[0]["ok"]
        return CaseResult("equal" if equal else "wrong", json.dumps(ranks[0]))

    def beside_fixed(self, case: Case) -> Case:
        """Return ``case`` without the settings that cannot be combined with the settings :attr:`fixed`.

        Settings are dropped one by one, until no rule refuses the case or until dropping any one leaves the same
        refusal.
        """
        refusal = self._refusal(case)
        while refusal:
            smaller = {name: _without(case, name) for name in reversed(case)}
            # a section is there as long as one setting of it is
            smaller["adapter"] = {n: v for n, v in case.items() if not n.startswith("adapter.")}  # fmt: skip
            freed = {n: self._refusal(c) for n, c in smaller.items()}
            better = [name for name, why in freed.items() if why != refusal]
            if not better:
                return case
            name = next((n for n in better if not freed[n]), better[0])
            case, refusal = smaller[name], freed[name]
        return case

    def _refusal(self, case: Case) -> str:
        """Return the rule that refuses ``case``; "" if none does."""
        layout, sets = command_options(case, self.fixed)
        try:
            prepare(load_recipe(self.path, sets, layout, quiet=True))
        except Conflict as refusal:
            return refusal.rule
        except (UsageError, WeftError) as error:
            return str(error)
        return ""

    def shrunk(self, case: Case, kind: str) -> tuple[Case, CaseResult]:
        """Drop all settings of a failing ``case`` that the failure does not need; return the case and its result.

        ``kind``: the kind of result that counts as the same failure.
        """
        verdict = self.verdict_of(case)
        needed = PAIRS if "data.path" in case else {}
        needed = REWARDS if "rl.group" in case else needed
        needed = PICTURES if "model.settings.zero" in case else needed
        for name in [name for name in case if name not in needed]:
            smaller = _without(case, name)
            outcome = self.verdict_of(smaller)
            if outcome.kind == kind:
                case, verdict = smaller, outcome
        return case, verdict

    def campaign(
        self, count: int, seed: int, ranks: int, minutes: float | None, first: int = 0
    ) -> Iterator[tuple[Case, CaseResult]]:
        """Run random cases, and yield each case with its result. A failing case is shrunk before it is yielded.

        ``count``: number of cases. ``seed``: seed of the random numbers that draw the cases. ``ranks``: the largest
        number of ranks of a case. ``minutes``: time after which the campaign ends early; None: no limit. ``first``:
        number of the first case, by which a campaign can be continued.
        """
        write_corpus()
        recipe = load_recipe(self.path, self.fixed, quiet=True)
        recipe.need_model()
        if recipe.model.origin:
            raise UsageError(
                "--random draws small models of the recipe's kind; give a recipe without model.from"
            )
        if recipe.model.kind == "diffusion":
            write_pictures()
        end = time.monotonic() + 60 * minutes if minutes else float("inf")
        for number in range(first, first + count):
            if time.monotonic() > end:
                return
            case = draw_case(recipe, random.Random(f"{seed}-{number}"), ranks)
            case = self.beside_fixed(case) if self.fixed else case
            verdict = self.verdict_of(case)
            if verdict.kind not in ("equal", "refused"):
                case, smaller = self.shrunk(case, verdict.kind)
                verdict = smaller if smaller.kind == verdict.kind else verdict
            yield case, verdict
