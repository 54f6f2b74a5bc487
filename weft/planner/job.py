"""The planner's job: a model's steps on a cluster, and the best layouts for it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.errors import UsageError, nearest
from weft.planner.acceptance import under_rules
from weft.planner.choose import unusable
from weft.planner.engine_constants import ENGINES, EngineConstants
from weft.planner.explain import (
    exchange_words,
    exchanges,
    layout_verdict,
    record,
    title,
)
from weft.planner.finalists import Final, finalists
from weft.planner.island_price import Islands, islands_of
from weft.planner.layout_search import Pin, SearchResult, search
from weft.planner.machine import Cluster, find_device, load_cluster
from weft.planner.mixed_cluster import MixedPlan, mixed_plans
from weft.planner.node_mapping import MappedFinal, with_links
from weft.planner.own import Own, calibrated, own_runs
from weft.planner.planned_model import SHAPES, PlannedModel, load_model, swept_values
from weft.planner.planned_recipe import recipe_tree, untrainable_line
from weft.recipe import ModelShape, build_recipe, load_recipe
from weft.recipe.shipped import find_recipe
from weft.shapes.shape import Shape

#: Bits of a product's factors.
PRECISIONS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "fp4": 4}
#: Percent; the 90th percentile of the presets' error, sources counted alike (docs/explanations/planner.md).
BAND = 12
#: Devices with published runs among those.
MEASURED = ("A100", "H100", "B200", "GB200")
#: Layouts that are looked at closely.
FINALISTS = 10


@dataclass(frozen=True)
class PlanJob:
    """A request for a plan: training steps of ``batch`` sequences of ``seq`` tokens of a model on a cluster.

    ``name``: the model's name. ``machines``: the cluster. ``engine``: the class of training program whose constants
    apply. ``precision``: number format of matrix products. ``pins``: the user's demands on the layout. ``hottest``:
    number of tokens that are routed to the busiest expert, divided by the mean over all experts.
    """

    name: str
    model: PlannedModel
    machines: Cluster
    engine: str
    batch: int
    seq: int
    precision: str
    pins: tuple[Pin, ...]
    hottest: float = 1.0

    @cached_property
    def shape(self) -> Shape:
        return replace(self.model.shape, hottest=self.hottest)

    @property
    def bits(self) -> int:
        return PRECISIONS[self.precision]

    @property
    def untrainable(self) -> str:
        """Reason why ``weft train`` cannot train the job's model in its precision yet; empty if it can."""
        return untrainable_line(self.model, self.bits)

    def search(
        self, engine: EngineConstants, shape: Shape | None = None
    ) -> SearchResult:
        """Score every layout for the job's model, or for a model of ``shape`` if that is given.

        ``engine``: constants of the training program.
        """
        searched = search(
            shape or self.shape, self.machines, engine, self.batch, self.seq, self.bits,
            self.pins,
        )  # fmt: skip
        return searched if shape else self.under_rules(searched)

    def under_rules(self, searched: SearchResult) -> SearchResult:
        """Return ``searched`` with a function that tells which plans the rules of the user's recipe refuse.

        Without a recipe for the model, and for a model that Weft cannot train, ``searched`` is returned unchanged.
        """
        if self.model.layout is None or self.untrainable:
            return searched
        return under_rules(
            searched, lambda final: build_recipe(recipe_tree(final, self.model)), self.model.section
        )  # fmt: skip

    def islands(self, engine: EngineConstants) -> Islands | None:
        """Plan the job's islands on the sites of the cluster.

        Returns None if the cluster has one site only, or if no plan of islands is possible.

        ``engine``: constants of the training program.
        """
        return islands_of(
            self.shape, self.machines, engine, self.batch, self.seq, self.bits,
            self.pins, self.under_rules,
        )  # fmt: skip


def read_job(
    model: str, cluster: str, gpus: int | None, batch: int | None, seq: int | None, precision: str | None, engine: str,
    pins: list[str], hottest: float, shape_named: Callable[[str], ModelShape],
) -> PlanJob:  # fmt: skip
    """Read and check a user's request for a plan.

    Args:
        ``model``: a built-in name, a recipe or a ``config.json``.
        ``cluster``: a preset or a cluster file.
        ``gpus``: number of devices; None: that of the cluster file. A preset has none.
        ``batch``, ``seq``, ``precision``: sequences of a step, tokens of a sequence, and number format of matrix
            products. Where they are None, those of the recipe count if ``model`` is one. Otherwise ``batch`` and
            ``seq`` must be given, and ``precision`` is bf16.
        ``engine``: the class of training program whose constants apply, a key of :data:`ENGINES`.
        ``pins``: demands on the layout, as texts such as ``tp<=8``.
        ``hottest``: tokens that are routed to the busiest expert, divided by the mean over all experts.
        ``shape_named``: reads the shapes of models that need PyTorch to be read.

    Raises :class:`UsageError` for a request that cannot be met.
    """
    if engine not in ENGINES:
        raise UsageError(
            f"--engine {engine!r} is not known; {nearest(engine, ENGINES)}"
        )
    name = model if model in SHAPES else str(find_recipe(model) or model)
    limits: list[Pin] = []
    if Path(name).suffix == ".toml":
        own = load_recipe(name)
        own.need_model()
        if own.model.kind == "diffusion":
            raise UsageError(
                f"{model} makes images, whose patches only the data know; compare layouts with weft verify, and plan "
                "samples with weft plan RUN --sample STEPS"
            )
        limits = unusable(own)
        batch, seq = batch or own.train.batch, seq or own.data.seq_len
        precision = precision or {"bfloat16": "bf16"}.get(own.train.dtype, "fp32")
    precision = precision or "bf16"
    if precision not in PRECISIONS:
        raise UsageError(
            f"--precision {precision!r} is not possible; {nearest(precision, PRECISIONS)}"
        )
    if batch is None or seq is None:
        missing = (
            "--batch (sequences per step)"
            if batch is None
            else "--seq (tokens per sequence)"
        )
        raise UsageError(f"{missing} is missing; only a recipe has its own")
    subject = load_model(name, shape_named)
    if subject.recipe.get("optimizer", {}).get("post_validation"):
        pins = [*pins, "pp>=2"]
    demanded = (*map(Pin.parse, pins), *limits)
    job = PlanJob(
        name, subject, load_cluster(cluster, gpus), engine, batch, seq, precision, demanded, hottest
    )  # fmt: skip
    shape = subject.shape
    most = max(1.0, float(shape.experts / max(shape.top_k, 1)))
    if not 1 <= hottest <= most:
        raise UsageError(f"--hottest {hottest:g} is not possible: an expert of {float(shape.experts):g}, {shape.top_k} "
                         f"per token, is chosen at most {most:g} times as often as the mean")  # fmt: skip
    return job


@dataclass(frozen=True)
class RankedLayouts:
    """The result of a planning job.

    ``searched``: all layouts with their scores. ``finals``: the best layouts after simulation, fastest first.
    ``margin``: text for the user about the error of predicted times. ``band``: the same error in percent; None if no
    prediction was compared with a measurement. ``islands``: the plan with an island per site; None with one site.
    ``mixed``: pipelines over the groups of a mixed cluster, fastest first. ``mapped``: for each of ``finals`` the best
    assignment of nodes, if links between nodes were measured.
    """

    searched: SearchResult
    finals: list[Final]
    margin: str
    band: int | None
    islands: Islands | None = None
    mixed: tuple[MixedPlan, ...] = ()
    mapped: tuple[MappedFinal, ...] = ()

    def record(self, job: PlanJob, top: int) -> dict[str, Any]:
        """Return the result of ``job`` as JSON, with the ``top`` fastest layouts."""
        return {
            "candidates": self.searched.count, "fitting": len(self.searched.order), "finalists": len(self.finals),
            "calibration": self.margin, "layouts": [record(final) for final in self.finals[:top]],
            "rejected": [str(line) for line in self.searched.rejected(top)],
            "refused": [vars(rule) for rule in self.searched.refused],
            "islands": self.islands.record() if self.islands else None,
            "mixed": [plan.record() for plan in self.mixed[:top]] or None,
            "nodes": [list(each.mapping.nodes) for each in self.mapped[:top]] or None,
            "experts": exchanges(self.searched, self.finals[0]) or None, "not_trainable": job.untrainable or None,
            "unasked": self.searched.unasked_line() or None,
        }  # fmt: skip

    def lines(self, job: PlanJob, top: int) -> list[str]:
        """Return lines about the fastest layout of ``job``, and on how each of the ``top`` fastest differs from it."""
        first = self.finals[0]
        lines = [
            f"{rank:<7} {layout_verdict(first, final)}"
            for rank, final in enumerate(self.finals[1:top], 2)
        ]
        if abs(off := first.seconds / first.closed - 1) > 0.02:
            lines.append(f"        1 is simulated: {off:+.1%} against the closed form")
        parts = {
            field.name: float(getattr(first.memory, field.name)) / 2**30
            for field in fields(first.memory)
        }
        held = ", ".join(f"{k} {v:.2g}" for k, v in parts.items() if v > 0.005)
        lines.append(f"\nmemory  {held} GiB on the fullest rank of 1")
        if sent := exchanges(self.searched, first):
            lines.append(f"experts {exchange_words(sent)}")
        if self.islands:
            lines += [f"islands {way}" for way in self.islands.lines(first.seconds)]
        if self.mixed:
            lines += [f"mixed   {line}" for line in self.mixed[0].lines(first.seconds)]
        elif job.machines.groups:
            lines.append(
                "mixed   no pipeline has whole ranks in every group; all wait for the weakest"
            )
        lines += [each.line for each in self.mapped[:1]]
        lines.append(f"margin  {self.margin}")
        if job.untrainable:
            lines.append(f"train   not trainable yet: {job.untrainable}")
        return lines


def rank_layouts(
    job: PlanJob, calibration: Path | None, runs: Path, top: int
) -> RankedLayouts:
    """Score all layouts of a job, and simulate at least the fastest ``top``; return scores and simulated layouts.

    ``calibration``: a file of measured runs to which the engine's constants are fitted, or of factors on the constants.
    If it is None, the user's measured runs in the file ``runs`` take its place, where there are any.
    """
    device, base = find_device(job.machines.device).name, ENGINES[job.engine]
    own = None
    if calibration is not None:
        own = calibrated(calibration, device, base)
    elif job.engine == "weft":
        own = own_runs(runs, device)
    engine = own.engine if own else ENGINES[job.engine]
    searched = job.search(engine)
    finals = finalists(searched, max(top, FINALISTS), vocabulary=job.engine == "weft")
    mapped = tuple[MappedFinal, ...]()
    if links := job.machines.links:
        per_node = job.machines.per_node
        each_mapped = [with_links(final, links, per_node) for final in finals]
        mapped = tuple(sorted(each_mapped, key=lambda each: each.final.seconds))
        finals = [each.final for each in mapped]
    mixed = tuple[MixedPlan, ...]()
    if job.machines.groups:
        mixed = tuple(mixed_plans(searched, job.machines, job.bits))
    return RankedLayouts(
        searched, finals, *_margin(job.machines.device, finals[0], own), job.islands(engine), mixed, mapped
    )  # fmt: skip


def _margin(device: str, first: Final, own: Own | None) -> tuple[str, int | None]:
    band = BAND if device.upper().startswith(MEASURED) else None
    if first.plan.moves:
        return (
            "what travels to and from host or files was compared with no run: take the order",
            None,
        )
    if own is not None:
        return own.message, round(own.error) if math.isfinite(own.error) else band
    if band is not None:
        return (
            f"presets, not calibrated: times within {band} % for nine published runs in ten",
            band,
        )
    return (
        f"no published run on {device} has been compared: take the order, not the times",
        None,
    )


@dataclass(frozen=True)
class SweptModel:
    """A variant of the job's model, and the best layout for it.

    ``fields``: the changed fields of the model, with their values. ``shape``: the variant. ``best``: the best layout,
    None if no layout is possible. ``refused``: why none is possible, else "".
    """

    fields: dict[str, Any]
    shape: Shape
    best: Final | None
    refused: str = ""

    def record(self) -> dict[str, Any]:
        """Return the variant as JSON: its changed fields, its numbers of parameters, and its layout.

        Without a layout it is the changed fields and the reason.
        """
        if self.best is None:
            return {"model": self.fields, "refused": self.refused}
        sizes = {
            "parameters": float(self.shape.parameters),
            "active": float(self.shape.active_parameters),
        }
        return {"model": self.fields, **sizes, **record(self.best)}

    def cells(self) -> list[str]:
        """Return a row of a table: model, parameters, active parameters (billions), and the layout's values."""
        row = [" ".join(f"{name}={value}" for name, value in self.fields.items())]
        row += [
            f"{float(n) / 1e9:.3g}"
            for n in (self.shape.parameters, self.shape.active_parameters)
        ]
        if (best := self.best) is None:
            return [*row, "-", "-", "-", "-", self.refused.partition(":")[0]]
        return [*row, f"{best.seconds:.3g}", f"{best.tokens_per_s:,.0f}", f"{best.utilisation:.1%}", f"{best.gib:.3g}",
                title(best)]  # fmt: skip


def sweep(job: PlanJob, asked: list[str]) -> Iterator[SweptModel]:
    """Yield every variant of the job's model with the values in ``asked``, each with the best layout for it.

    ``asked``: texts such as ``experts=64,128``; all combinations are tried. Raises :class:`UsageError` for a model that
    Weft cannot train.
    """
    if job.model.untrainable:
        raise UsageError(
            "--sweep needs a model that Weft can train: a recipe, a config.json or a trained built-in"
        )
    for values, shape in swept_values(job.model.section, asked, job.model.vocab):
        try:
            best = finalists(job.search(ENGINES[job.engine], shape), 3)[0]
            yield SweptModel(values, shape, best)
        except UsageError as error:
            yield SweptModel(values, shape, None, str(error))
