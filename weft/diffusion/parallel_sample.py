"""Samples by a sampling table, over ranks: which table is meant, what is sampled, and the images that come of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from weft.diffusion.class_words import class_number
from weft.diffusion.coordinated_noise import CoordinatedNoise
from weft.diffusion.patch_denoiser import PatchDenoiser, SolverSteps
from weft.diffusion.sample import seeded_noise, solver_of
from weft.diffusion.sampling_check import (
    EXACT,
    RunnableTable,
    sampling_scheme_of,
    sampling_table_of,
)
from weft.diffusion.sampling_run import SampleSource, SamplingRun
from weft.diffusion.sampling_table import SamplingShape
from weft.diffusion.solver import sample_times
from weft.errors import UsageError
from weft.models.patches import patchify, real_values, unpatchify

if TYPE_CHECKING:
    from weft.diffusion.denoiser import Denoiser
    from weft.diffusion.guidance_halves import HalvesOverRanks
    from weft.diffusion.sample import SampleRequest
    from weft.diffusion.tile_mix import TileMix
    from weft.layout.layout import Layout
    from weft.shapes.diffusion_shape import DiffusionSettings

T = torch.Tensor


class NamedTable(NamedTuple):
    """A sampling table as a user names it: its ``word``, such as ``pcpp:part=0.3``, and its number of ``ranks``.

    A sampling table is the plan of which rank computes which tokens in which step.
    """

    word: str
    ranks: int


def table_of_options(layout: Layout, stale: int | None, table: str) -> NamedTable:
    """Return the sampling table that the options ``--layout``, ``--stale`` and ``--table`` name.

    ``layout``: its ranks along ``cp`` divide the image into bands, those along ``pp`` divide the layers. ``stale``: how
    many steps ago the keys of other ranks were computed that a rank uses (0: in the same step); None: not given.
    ``table``: name and settings of a table; "": not given. Raises :class:`UsageError` for options that contradict each
    other or name no table.
    """
    sizes = {"cp": layout.cp, "pp": layout.pp}
    if layout.world != max(sizes.values()):
        raise UsageError(
            f"--layout {layout}: a sample is cut by cp (bands of the image) or by pp (layers), one of them; "
            "leave the other axes out"
        )
    if table and stale is not None:
        raise UsageError(
            f"--stale is for tables that --layout names; give the age in --table {table.split(':')[0]}:age={stale}"
        )
    if table:
        return NamedTable(table, layout.world)
    if stale is not None and stale < 0:
        raise UsageError(f"--stale {stale} is below 0; give 0 for fresh keys")
    if layout.pp > 1:
        if (stale or 0) > 1:
            raise UsageError(
                f"--stale {stale}: keys of patches in a pipeline are at most 1 step old; give 1"
            )
        return NamedTable("pipefusion" if stale else "pipefusion:age=0", layout.pp)
    return NamedTable(f"distrifusion:age={stale}" if stale else EXACT, layout.cp)


def settings_with_frames(settings: DiffusionSettings, frames: int) -> DiffusionSettings:
    """Return ``settings`` for a video of ``frames`` frames; 0: as many as the model was trained on.

    Raises :class:`UsageError` if ``frames`` is given for a model of images, or if the model cannot make so many frames.
    """
    if not frames:
        return settings
    if not settings.of_video:
        raise UsageError(
            f"--frames {frames} is for models of videos, and this one makes images; leave it out"
        )
    if frames % settings.patch_frames:
        raise UsageError(
            f"--frames {frames} is no multiple of the {settings.patch_frames} frames of a patch"
        )
    if frames > settings.size[0] and settings.positions != "rotary":
        raise UsageError(
            f"--frames {frames} are more than the {settings.size[0]} that the model was trained on, which knows no "
            "places beyond; train one with model.settings.positions = 'rotary'"
        )
    return settings.model_copy(update={"size": (frames, *settings.size[1:])})


def asked_conditions(
    settings: DiffusionSettings,
    count: int,
    classes: str = "",
    names: Sequence[str] = (),
    prompts: Sequence[str] = (),
) -> T:
    """Return the condition of each of ``count`` samples that a user asks for.

    ``settings``: settings of the model. The result is class numbers, int64 ``[count]``, where the number of classes
    stands for no class; or captions, int64 ``[count, words, pieces]``.

    ``classes``: names or numbers of classes, separated by commas, to be used in turn; "none": no class; "": all classes
    in turn. ``names``: names of the classes. ``prompts``: captions, to be used in turn; empty: no caption. Raises
    :class:`UsageError` for a class that the model does not know, for captions if it reads no text, and for classes if
    it does.
    """
    known = settings.classes
    if settings.text:
        if classes not in ("", "none"):
            raise UsageError(
                f"--class {classes}: this model reads texts and knows no classes; say --prompt TEXT"
            )
        return prompt_captions(settings, count, prompts)
    if prompts:
        raise UsageError(
            "--prompt: this model reads no texts; "
            + (f"give --class, of 0 to {known - 1}" if known else "leave it out")
        )
    if not classes:
        return torch.arange(count) % known if known else torch.zeros(count).long()
    try:
        asked = [class_number(word, known, names) for word in classes.split(",")]
    except UsageError as error:
        raise UsageError(f"--class {classes}: {error}") from None
    check_count(count, len(asked), "classes")
    return torch.tensor([asked[i % len(asked)] for i in range(count)])


def check_count(count: int, asked: int, what: str) -> None:
    """Raise :class:`UsageError` if ``count`` samples are fewer than the ``asked`` classes or prompts.

    ``what``: the word for these in the error, such as "prompts".
    """
    if asked > count:
        raise UsageError(
            f"--count {count} leaves some of the {asked} {what} out; give --count {asked}, or fewer {what}"
        )


def prompt_captions(
    settings: DiffusionSettings, count: int, prompts: Sequence[str]
) -> T:
    """Return ``prompts`` in turn as ``count`` captions in the form that a model with ``settings`` reads.

    The result is int64 ``[count, words, pieces]``. Raises :class:`UsageError` for a prompt with more words than the
    model reads.
    """
    from weft.data.captions import caption_words, captions_as_rows

    if not settings.words:
        raise UsageError(
            "this model reads text states of an encoder of others; call weft.diffusion.sample with them"
        )
    check_count(count, len(prompts), "prompts")
    for prompt in prompts:
        if (length := len(caption_words(prompt))) > settings.words:
            raise UsageError(
                f"a prompt has {length} words, and this model reads {settings.words}; say it in fewer"
            )
    sayings = [prompts[i % len(prompts)] if prompts else "" for i in range(count)]
    return torch.from_numpy(
        captions_as_rows(sayings, settings.words, settings.word_rows)
    )


class TableSampling:
    """Sampling from a diffusion transformer over several ranks, by a sampling table.

    Args:
        ``denoiser``: the transformer.
        ``request``: the request for samples, which also names the sampler.
        ``table``: name and number of ranks of the table.
        ``frames``: frames of a video; 0: as many as the model was trained on.
        ``dropped``: the condition that stands for none.
        ``split``: whether two groups of ranks, each as large as the table, divide classifier-free guidance.

    Raises :class:`UsageError` for a table that these samples do not allow.

    Attributes:
        ``runnable``: the table, validated.
        ``settings``: settings of the model, with the size of the samples, or of their tiles.
        ``mix``: joins tiles, if the table has tiles.
        ``bytes_sent``: bytes that this rank has sent.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        request: SampleRequest,
        table: NamedTable,
        frames: int = 0,
        dropped: T | int = 0,
        split: bool = False,
    ) -> None:
        self.denoiser, self.request, self.dropped = denoiser, request, dropped
        self.split = split
        self.half: HalvesOverRanks | None = None
        if split and request.guidance == 1:
            raise UsageError(
                "--split-guidance spreads guidance over ranks, and --guidance 1 is none; give another scale"
            )
        self.settings = settings_with_frames(denoiser.settings, frames)
        times = sample_times(denoiser.process, request.steps)
        self.solver = SolverSteps(solver_of(request.sampler), denoiser.process, times)
        grid = self.settings.grid
        shape = SamplingShape(
            table.ranks, len(self.solver.evaluations), denoiser.model.shape.layers, grid[0], prod(grid[1:]),
            self.settings.of_video,
        )  # fmt: skip
        self.runnable: RunnableTable = sampling_table_of(table.word, shape)
        self.mix = self._tiles()
        self._check_length()
        self.context = self.bytes_sent = 0
        if table.word != EXACT and len(self.runnable.source.blocks) > 1:
            self.context = sampling_scheme_of(table.word).noise_blocks(shape)

    def _tiles(self) -> TileMix | None:
        """Return what joins tiles. Raises :class:`UsageError` if patches reach beyond the model's images."""
        tiles, settings = self.runnable.source.tiles, self.settings
        if tiles is None:
            return None
        from weft.diffusion.tile_mix import TileMix

        if any(n % settings.patch for n in settings.size):
            size = " x ".join(map(str, settings.size))
            raise UsageError(
                f"images of {size} pixels are no whole patches of {settings.patch} x {settings.patch}, and tiles of "
                "them would leave gaps; take a table without tiles"
            )
        return TileMix(tiles, settings.patch_values, settings.patch)

    def _check_length(self) -> None:
        """Raise :class:`UsageError` if a row has more tokens than the model has ever seen together."""
        source, most = self.runnable.source, self.denoiser.settings.patches
        for row in source.rows:
            tokens = sum(source.blocks[block] for block in row.queries)
            tokens += sum(key.end - key.first for key in row.keys if key.joined)
            if tokens > most:
                raise UsageError(
                    f"a rank computes {tokens // source.unit} frames at once, and the model was trained on "
                    f"{most // source.unit}; take more ranks, or shorter blocks and context"
                )

    def _whole_noise(self, first: int, count: int) -> T:
        """Return the noise of samples ``first`` and following, ``[count, tokens, values]``."""
        size = (self.settings.channels, *self.settings.size)
        seed = self.request.seed
        whole = [seeded_noise(size, seed, first + i) for i in range(count)]
        return patchify(torch.stack(whole), self.settings)

    def _noise(self, first: int, count: int) -> Callable[[int, int, int], T]:
        """Return the function that gives pieces of blocks of noise."""
        source = self.runnable.source
        if self.mix is not None:
            return self._noise_of_tiles(self.mix, first, count)
        if not self.context:
            whole = self._whole_noise(first, count)

            def cut(block: int, start: int, end: int) -> T:
                place = source.places[block]
                return whole[:, place + start : place + end]

            return cut
        unit = source.unit
        units = [tokens // unit for tokens in source.blocks]
        together = CoordinatedNoise(
            self.request.seed, range(first, first + count), units[0], units[1], self.context // unit,
            (unit, self.settings.patch_values),
        )  # fmt: skip

        def of_template(block: int, start: int, end: int) -> T:
            return together.block(block).flatten(1, 2)[:, start:end]

        return of_template

    def _noise_of_tiles(
        self, mix: TileMix, first: int, count: int
    ) -> Callable[[int, int, int], T]:
        size, seed = (self.settings.channels, *mix.size), self.request.seed
        pixels = torch.stack([seeded_noise(size, seed, first + i) for i in range(count)])  # fmt: skip

        def of_tile(block: int, start: int, end: int) -> T:
            return mix.cut(pixels, block)[:, start:end]

        return of_tile

    def batch(
        self,
        first: int,
        conditions: T,
        run: Callable[[RunnableTable, PatchDenoiser, SolverSteps, SampleSource], SamplingRun],
    ) -> tuple[T | None, SamplingRun]:  # fmt: skip
        """Sample a batch. Returns the samples (None on all ranks but the first), and this rank's measurements.

        ``first``: number of the batch's first sample. ``conditions``: condition of each sample. ``run``: function that
        runs the table, such as :func:`weft.diffusion.sampling_ranks.run_over_ranks`.
        """
        count, request = len(conditions), self.request
        tokens = PatchDenoiser(
            self.denoiser, conditions, self.solver.evaluations, request.guidance, self.dropped,
            real_values(self.settings), self.half,
        )  # fmt: skip
        blocks: dict[int, T] = {}
        source = SampleSource(
            count, self.settings.patch_values, self.denoiser.dtype, self._noise(first, count), blocks.__setitem__,
            conditions.device, self.settings.patch,
        )  # fmt: skip
        measured = run(self.runnable, tokens, self.solver, source)
        if not blocks:
            return None, measured
        if self.mix is not None:
            return self.mix.joined(blocks), measured
        patches = torch.cat([blocks[block] for block in sorted(blocks)], dim=1)
        return unpatchify(patches, self.settings), measured

    def over_ranks(self) -> T | None:
        """Return all samples, ``[samples, channels, (frames,) height, width]``, on the first rank; None on the others.

        All ranks of the table call it. With ``split``, two groups of ranks call it, each with the ranks of one table;
        the first group computes with conditions.
        """
        from weft.diffusion.sampling_ranks import run_over_ranks

        halves = self._halves() if self.split else None
        self.half = halves
        run_table = (
            partial(run_over_ranks, group=halves.group) if halves else run_over_ranks
        )
        self.bytes_sent = 0
        batches = []
        conditions, size = self.request.conditions, self.request.batch
        for start in range(0, len(conditions), size):
            some = conditions[start : start + size]
            images, run = self.batch(self.request.first + start, some, run_table)
            batches.append(images)
            self.bytes_sent += run.bytes_sent
        if halves is not None:
            halves.wire.flush()
            self.bytes_sent += halves.wire.bytes_sent
            if not halves.conditional:
                return None
        there = [each for each in batches if each is not None]
        return torch.cat(there) if there else None

    def _halves(self) -> HalvesOverRanks:
        from weft.diffusion.guidance_halves import HalvesOverRanks

        return HalvesOverRanks(self.request.conditions.device)

    def as_threads(self) -> T:
        """Return the same samples as :meth:`over_ranks`, with all ranks as threads of this process."""
        from weft.diffusion.threads_as_ranks import run_as_threads

        def run(
            runnable: RunnableTable, tokens: PatchDenoiser, solver: SolverSteps, source: SampleSource
        ) -> SamplingRun:  # fmt: skip
            return run_as_threads(runnable, tokens.own, solver, source)[0]

        images = self.batch(self.request.first, self.request.conditions, run)[0]
        assert images is not None
        return images
