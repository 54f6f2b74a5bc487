"""Draw the pictures of the documentation: boxes on a grid and arrows between them, as SVG that needs nothing else.

python bench/pictures.py [FOLDER]          # docs/explanations/pictures
"""

from __future__ import annotations

import html
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/explanations/pictures"
INK, SOFT = "#1f2937", "#6b7280"
#: Fill and edge of boxes.
COLOURS = {
    "blue": ("#e0e7ff", "#6366f1"),
    "green": ("#dcfce7", "#22a05a"),
    "orange": ("#ffedd5", "#ea8a2f"),
    "red": ("#fee2e2", "#dc5a5a"),
    "grey": ("#f3f4f6", "#9ca3af"),
    "violet": ("#f3e8ff", "#a855c7"),
}


class Box(NamedTuple):
    """A box in cell ``(column, row)``, with a title and lines below it."""

    column: float
    row: float
    title: str
    lines: Sequence[str] = ()
    colour: str = "blue"
    width: float = 1.0


class Arrow(NamedTuple):
    """An arrow between two boxes, by their names, with a word beside its middle."""

    start: str
    end: str
    word: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Picture:
    """Boxes by name, arrows, and notes ``(column, row, text)``; a cell is ``cell`` pixels wide and ``high`` high."""

    title: str
    boxes: dict[str, Box]
    arrows: Sequence[Arrow] = ()
    notes: Sequence[tuple[float, float, str]] = ()
    cell: int = 190
    high: int = 96
    gap: int = 46
    tall: int = 0
    bands: Sequence[tuple[float, float, float, float, str]] = field(default=())


def written(
    x: float,
    y: float,
    text: str,
    size: int = 12,
    colour: str = INK,
    bold: bool = False,
    anchor: str = "middle",
) -> str:
    """A line of text whose anchor is at ``(x, y)``."""
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}"{weight}>{html.escape(text)}</text>'


def frame(picture: Picture, box: Box) -> tuple[float, float, float, float]:
    """Left, top, width and height of a box in pixels."""
    width = box.width * picture.cell - picture.gap
    height = picture.tall or 34 + 15 * len(box.lines)
    left = 20 + box.column * picture.cell
    middle = 46 + box.row * picture.high + picture.high / 2
    return left, middle - height / 2, width, height


def border(
    x: float, y: float, w: float, h: float, towards: tuple[float, float]
) -> tuple[float, float]:
    """The point on the edge of a box on the way from its middle to ``towards``."""
    cx, cy = x + w / 2, y + h / 2
    dx, dy = towards[0] - cx, towards[1] - cy
    scale = min(w / 2 / abs(dx) if dx else 9e9, h / 2 / abs(dy) if dy else 9e9)
    return cx + dx * scale, cy + dy * scale


def svg(picture: Picture) -> str:
    """The picture as a file."""
    frames = {name: frame(picture, box) for name, box in picture.boxes.items()}
    rights = [x + w for x, _, w, _ in frames.values()]
    rights += [
        20 + (c + w) * picture.cell - picture.gap for c, _, w, _, _ in picture.bands
    ]
    right = max([*rights, 9 * len(picture.title)]) + 20
    bottom = (
        max(
            [y + h for _, y, _, h in frames.values()]
            + [46 + (r + 0.5) * picture.high + 12 for _, r, _ in picture.notes]
            + [46 + (r + h) * picture.high for _, r, _, h, _ in picture.bands]
        )
        + 20
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right:.0f} {bottom:.0f}" '
        'font-family="Inter, Helvetica, Arial, DejaVu Sans, sans-serif">',
        f"<title>{html.escape(picture.title)}</title>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" '
        'markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
        f'<path d="M0 0L10 5L0 10z" fill="{SOFT}"/></marker></defs>',
        f'<rect width="{right:.0f}" height="{bottom:.0f}" fill="#ffffff"/>',
        written(20, 28, picture.title, 15, INK, True, "start"),
    ]
    for column, row, width, height, text in picture.bands:
        x, y = 20 + column * picture.cell - 12, 46 + row * picture.high
        w, h = width * picture.cell - picture.gap + 24, height * picture.high
        out.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{w:.0f}" height="{h:.0f}" rx="10" '
            'fill="#fafafa" stroke="#d1d5db" stroke-dasharray="4 4"/>'
        )
        out.append(written(x + 10, y + 16, text, 11, SOFT, False, "start"))
    for arrow in picture.arrows:
        a, b = frames[arrow.start], frames[arrow.end]
        middle_a, middle_b = (
            (a[0] + a[2] / 2, a[1] + a[3] / 2),
            (b[0] + b[2] / 2, b[1] + b[3] / 2),
        )
        x1, y1 = border(*a, middle_b)
        x2, y2 = border(*b, middle_a)
        dash = ' stroke-dasharray="5 4"' if arrow.dashed else ""
        out.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{SOFT}" stroke-width="1.5" marker-end="url(#tip)"{dash}/>'
        )
        if arrow.word:
            level = abs(y2 - y1) < abs(x2 - x1)
            x, y = (x1 + x2) / 2, (y1 + y2) / 2
            out.append(
                written(
                    x if level else x + 7,
                    y - 6 if level else y + 4,
                    arrow.word,
                    11,
                    SOFT,
                    False,
                    "middle" if level else "start",
                )
            )
    for name, box in picture.boxes.items():
        x, y, w, h = frames[name]
        fill, edge = COLOURS[box.colour]
        out.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{w:.0f}" height="{h:.0f}" rx="7" fill="{fill}" stroke="{edge}"/>'
        )
        top = y + h / 2 - 7.5 * len(box.lines) + 5
        out.append(written(x + w / 2, top, box.title, 13, INK, True))
        out += [
            written(x + w / 2, top + 16 + 15 * i, line, 11, SOFT)
            for i, line in enumerate(box.lines)
        ]
    out += [
        written(
            20 + c * picture.cell,
            46 + r * picture.high + picture.high / 2,
            text,
            12,
            SOFT,
            False,
            "start",
        )
        for c, r, text in picture.notes
    ]
    return "\n".join([*out, "</svg>"]) + "\n"


def chain(*names: str) -> list[Arrow]:
    """Arrows from each name to the next."""
    return [Arrow(a, b) for a, b in pairwise(names)]


def rooms() -> Picture:
    """The rooms in their order: each row may import the rows above it."""
    rows = [
        ["recipe", "shapes", "net"],
        ["layout"],
        ["models"],
        ["schedule", "data", "memory"],
        ["parallel", "peers"],
        ["checkpoint"],
        ["sync"],
        ["run", "train"],
        ["prove"],
        ["resilience"],
        ["rehearse", "generate"],
        ["serve"],
        ["techniques", "cli"],
    ]
    about = {
        "recipe": "what a user asks for",
        "shapes": "a model in numbers",
        "net": "processes and wires",
        "layout": "axes, cuts, mesh",
        "models": "modules for one device",
        "schedule": "tables of actions",
        "data": "texts to batches",
        "memory": "tiers",
        "parallel": "State, units, parallelize",
        "peers": "machines behind NAT",
        "checkpoint": "boxes on a disk",
        "sync": "how islands agree",
        "run": "processes become ranks",
        "train": "the step and its loop",
        "prove": "equal to one device?",
        "resilience": "views, copies",
        "rehearse": "one step, counted",
        "generate": "engine and caches",
        "serve": "HTTP",
        "techniques": "the leaves",
        "cli": "one file per command",
    }
    boxes = {
        name: Box(
            i * 1.05 + (3 - len(row)) * 0.52,
            r,
            name,
            [about[name]],
            "violet" if name == "techniques" else "blue" if r < 8 else "green",
        )
        for r, row in enumerate(rows)
        for i, name in enumerate(row)
    }
    boxes["observe"] = Box(
        3.5,
        3,
        "observe",
        ["beside the order:", "metrics, reports, doctor"],
        "orange",
        1.1,
    )
    boxes["planner"] = Box(
        3.5, 5, "planner", ["beside the order:", "predicts a layout"], "orange", 1.1
    )
    notes = [(3.5, 0, "A room may import"), (3.5, 0.3, "those above it.")]
    return Picture("The rooms of the package", boxes, [], notes, 190, 58, 40, 0)


def pictures() -> dict[str, Picture]:
    """All pictures, by the names of their files."""
    arrow = {
        "recipe": Box(0, 0, "recipe", ["TOML or Python", "recipe/"], "grey"),
        "plan": Box(1, 0, "plan", ["ranked layouts", "planner/"], "orange"),
        "build": Box(2, 0, "build", ["mesh, model, State", "parallel/build.py"]),
        "table": Box(3, 0, "step table", ["if pp > 1", "schedule/"]),
        "loop": Box(
            3, 1.1, "loop", ["data, step, agree,", "record, save: train/"], "green"
        ),
        "state": Box(2, 1.1, "State", ["values and slots", "in units"], "green"),
        "ckpt": Box(1, 1.1, "checkpoint", ["logical tensors", "checkpoint/"], "violet"),
        "engine": Box(0, 1.1, "engine", ["generate/, serve/"], "violet"),
    }
    step = {
        "data": Box(
            0, 0, "data", ["samples of this step", "by seed and number"], "grey"
        ),
        "gradients": Box(
            1, 0, "gradients", ["forward and backward", "of every microbatch"]
        ),
        "agree": Box(2, 0, "agree", ["sums over ranks,", "norm, clipping"], "orange"),
        "update": Box(3, 0, "update", ["one rule for each", "parameter"], "green"),
        "record": Box(
            4, 0, "record, save", ["metrics, snapshot,", "checkpoint"], "violet"
        ),
        "g": Box(
            1,
            1.25,
            "also fills it",
            ["zeroth order,", "gradient codes,", "pipeline tables"],
            "grey",
        ),
        "a": Box(
            2,
            1.25,
            "also fills it",
            ["islands, robust", "aggregation,", "post-validation"],
            "grey",
        ),
        "u": Box(
            3,
            1.25,
            "also fills it",
            ["during backward,", "speculation, host and", "device by turns"],
            "grey",
        ),
    }
    view = {
        "train": Box(
            0, 0, "a view trains", ["epoch 4: members", "0, 1, 2, 3"], "green"
        ),
        "suspect": Box(
            1,
            0,
            "member 2 is silent",
            ["agents watch each other:", "heartbeats, /proc"],
            "red",
        ),
        "propose": Box(
            2, 0, "the leader proposes", ["epoch 5: members", "0, 1, 3"], "orange"
        ),
        "commit": Box(3, 0, "all commit", ["a quorum has", "acknowledged"], "orange"),
        "restore": Box(
            3, 1.2, "restore", ["newest step of which", "every part has a copy"]
        ),
        "layout": Box(2, 1.2, "layout for fewer", ["dp and shard shrink", "first"]),
        "again": Box(
            1,
            1.2,
            "the same step again",
            ["same samples,", "counted by the ledger"],
            "green",
        ),
        "join": Box(
            0,
            1.2,
            "a newcomer joins",
            ["weft ranks add, or a", "rank that thawed"],
            "violet",
        ),
    }
    request = {
        "http": Box(0, 0, "request", ["HTTP, template,", "tokens"], "grey"),
        "wait": Box(
            1, 0, "waits", ["policy chooses,", "prefix is looked up"], "orange"
        ),
        "prompt": Box(
            2, 0, "reads its prompt", ["in chunks, beside", "others' new tokens"]
        ),
        "decode": Box(
            3, 0, "writes", ["a token per step, or", "several guesses checked"], "green"
        ),
        "done": Box(
            4, 0, "ends", ["stop id, stop string,", "length, disconnect"], "violet"
        ),
        "pre": Box(
            2, 1.2, "is preempted", ["no free block: gives its", "blocks back"], "red"
        ),
        "move": Box(3, 1.2, "moves", ["to another engine,", "block by block"], "grey"),
        "fork": Box(
            4, 1.2, "forks", ["n answers, beams,", "paths share blocks"], "grey"
        ),
    }
    block = {
        "free": Box(0, 0, "free", ["a number in the pool"], "grey"),
        "open": Box(
            1, 0, "being written", ["one owner, fewer", "tokens than fit"], "green"
        ),
        "full": Box(
            2,
            0,
            "full",
            ["found by a key: tokens,", "previous key, weights,", "adapter, tenant"],
        ),
        "shared": Box(
            3,
            0,
            "shared",
            ["several owners read it;", "a writer copies it first"],
            "violet",
        ),
        "idle": Box(
            2,
            1.3,
            "kept, no owner",
            ["may be found again,", "least recent goes first"],
            "orange",
        ),
    }
    islands = {
        "a": Box(0, 0, "island 0", ["20 steps of its own", "on its samples"], "green"),
        "b": Box(
            0, 1.2, "island 1", ["20 steps of its own", "on its samples"], "green"
        ),
        "da": Box(
            1.1, 0, "pseudo-gradient", ["anchor - parameters,", "compressed"], "orange"
        ),
        "db": Box(
            1.1,
            1.2,
            "pseudo-gradient",
            ["anchor - parameters,", "compressed"],
            "orange",
        ),
        "mean": Box(2.2, 0.6, "mean", ["over slow links,", "a ring or pairs"], "red"),
        "outer": Box(
            3.2,
            0.6,
            "outer update",
            ["the same on all islands:", "begins the next round"],
        ),
    }
    tiers = {
        "file": Box(
            0, 0.9, "file", ["weights, gradients,", "moments of all blocks"], "grey"
        ),
        "buffers": Box(
            1.15, 0.9, "buffers", ["four units:", "two threads, O_DIRECT"], "orange"
        ),
        "next": Box(2.3, 0, "the next block", ["is on its way in"], "blue"),
        "now": Box(2.3, 0.9, "this block", ["computes all", "microbatches"], "green"),
        "last": Box(
            2.3, 1.8, "the last block", ["its gradient is on", "its way out"], "violet"
        ),
    }
    planner = {
        "model": Box(0, 0, "model", ["shape in numbers"], "grey"),
        "cluster": Box(0, 0.8, "cluster", ["devices and links"], "grey"),
        "batch": Box(0, 1.6, "batch, tokens", ["and pins"], "grey"),
        "all": Box(1.1, 0.8, "every layout", ["arrays of candidates"]),
        "time": Box(2.1, 0.35, "time", ["by cause"], "orange"),
        "memory": Box(2.1, 1.25, "memory", ["of the fullest rank"], "orange"),
        "final": Box(3.1, 0.8, "finalists", ["on the schedule", "simulator"], "green"),
        "why": Box(
            4.1, 0.8, "ranking", ["with reasons: page,", "recipe, JSON"], "violet"
        ),
    }
    ranks = {
        f"{d}{s}{t}": Box(
            t * 0.95 + d * 2.25,
            s,
            f"rank {4 * d + 2 * s + t}",
            [
                f"heads {'0-3' if t == 0 else '4-7'}",
                f"{'first' if s == 0 else 'second'} half of its rows",
            ],
            "blue" if t == 0 else "green",
        )
        for d in range(2)
        for s in range(2)
        for t in range(2)
    }
    return {
        "arrow": Picture(
            "What flows: from a recipe to an engine",
            arrow,
            [
                *chain("recipe", "plan", "build", "table", "loop"),
                *chain("loop", "state", "ckpt", "engine"),
                Arrow("ckpt", "build", "resume, any layout", True),
            ],
        ),
        "rooms": rooms(),
        "step": Picture(
            "The life of a step: each phase is filled by one thing",
            step,
            [
                *chain("data", "gradients", "agree", "update", "record"),
                Arrow("g", "gradients", "", True),
                Arrow("a", "agree", "", True),
                Arrow("u", "update", "", True),
            ],
        ),
        "view": Picture(
            "The life of a view: who takes part, and what happens when one is lost",
            view,
            [
                *chain(
                    "train",
                    "suspect",
                    "propose",
                    "commit",
                    "restore",
                    "layout",
                    "again",
                ),
                Arrow("again", "train"),
                Arrow("join", "train", "", True),
                Arrow("suspect", "train", "heard", True),
            ],
            cell=200,
        ),
        "request": Picture(
            "The life of a request",
            request,
            [
                *chain("http", "wait", "prompt", "decode", "done"),
                Arrow("prompt", "pre", "", True),
                Arrow("decode", "pre", "", True),
                Arrow("pre", "wait", "", True),
                Arrow("decode", "move", "", True),
                Arrow("decode", "fork", "", True),
            ],
        ),
        "block": Picture(
            "The life of a block of the cache",
            block,
            [
                Arrow("free", "open", "taken"),
                Arrow("open", "full", "filled"),
                Arrow("full", "shared", "found"),
                Arrow("shared", "idle", "let go"),
                Arrow("full", "idle", "let go"),
                Arrow("idle", "free", "needed"),
                Arrow("idle", "shared", "", True),
            ],
            cell=215,
        ),
        "round": Picture(
            "A round: islands step by themselves, then agree",
            islands,
            [*chain("a", "da", "mean", "outer"), *chain("b", "db", "mean")],
        ),
        "tiers": Picture(
            "State in a file: a block at a time, the next one on its way",
            tiers,
            [
                Arrow("file", "buffers", "reads"),
                Arrow("buffers", "next"),
                Arrow("buffers", "now"),
                Arrow("last", "buffers"),
                Arrow("buffers", "file", ""),
            ],
            cell=200,
        ),
        "planner": Picture(
            "From a question to ranked layouts, in about a second",
            planner,
            [
                *(Arrow(n, "all") for n in ("model", "cluster", "batch")),
                Arrow("all", "time"),
                Arrow("all", "memory"),
                Arrow("time", "final"),
                Arrow("memory", "final"),
                Arrow("final", "why"),
            ],
        ),
        "layout": Picture(
            "dp=2, shard=2, tp=2: what each of eight ranks holds of a matrix with eight heads",
            ranks,
            [],
            cell=175,
            bands=[
                (0, -0.12, 1.95, 2.25, "replica 0: samples 0, 2, 4, ..."),
                (2.25, -0.12, 1.95, 2.25, "replica 1: samples 1, 3, 5, ..."),
            ],
        ),
    }


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures().items():
        (folder / f"{name}.svg").write_text(svg(picture))


if __name__ == "__main__":
    main()
