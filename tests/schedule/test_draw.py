"""Pictures of schedules: complete, well-formed, and on their own."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.browser import CHROMIUM, measured
from weft.schedule import draw
from weft.schedule.actions import Action, Table, assemble
from weft.schedule.build import build
from weft.schedule.kinds import KINDS
from weft.schedule.simulate import Simulation, simulate, uniform_costs
from weft.schedule.times import Times

#: Files that want a browser: it starts for them once.
TOGETHER = "browser"

SVG = "{http://www.w3.org/2000/svg}"


def simulated(table: Table, move: float = 0.0) -> Simulation:
    return simulate(table, uniform_costs(table, Times(move=move)))


def v_table() -> Table:
    """Two ranks with two stages each, folded: rank 0 holds stages 0 and 3."""
    kinds = ("F", "I", "W")
    orders = [
        [
            ("F", 0, 0),
            ("F", 0, 1),
            ("F", 3, 0),
            ("I", 3, 0),
            ("W", 3, 0),
            ("F", 3, 1),
            ("I", 3, 1),
            ("W", 3, 1),
        ]
        + [(kind, 0, m) for m in range(2) for kind in kinds[1:]],
        [(kind, s, m) for m in range(2) for kind, s in (("F", 1), ("F", 2))]
        + [(kind, s, m) for m in range(2) for s in (2, 1) for kind in kinds[1:]],
    ]
    return assemble("folded", orders, 4, [range(4)] * 2)


CASES = {
    "1f1b": lambda: simulated(build("1f1b", 4, 8), 0.25),
    "interleaved": lambda: simulated(build("interleaved-1f1b", 4, 8)),
    "folded": lambda: simulated(v_table()),
    "dense": lambda: simulated(build("gpipe", 8, 64)),
    "one": lambda: simulated(build("gpipe", 1, 1)),
}


@pytest.fixture(params=CASES)
def simulation(request: pytest.FixtureRequest) -> Simulation:
    return CASES[request.param]()


def boxes(picture: ElementTree.Element) -> list[ElementTree.Element]:
    return [
        g for g in picture.iter(f"{SVG}g") if (g.get("class") or "").startswith("a ")
    ]


def test_svg_holds_a_box_for_every_action_where_it_belongs(
    simulation: Simulation,
) -> None:
    picture = ElementTree.fromstring(draw.svg(simulation))
    timed = [t for rank in simulation.timeline for t in rank]
    drawn = [box[0] for box in boxes(picture)]
    assert len(drawn) == len(timed) == sum(map(len, simulation.table.ranks))
    lanes = [r for r in picture.iter(f"{SVG}rect") if r.get("class") == "lane"]
    left, wide = float(lanes[0].get("x", "")), float(lanes[0].get("width", ""))
    for t, rect in zip(timed, drawn, strict=True):
        assert rect.get("y") == lanes[t.action.rank].get("y")
        middle = left + (t.start + t.end) / 2 / simulation.elapsed * wide
        assert float(rect.get("x", "")) + float(
            rect.get("width", "")
        ) / 2 == pytest.approx(middle, abs=0.6)
    shown = [node.text for node in picture.iter(f"{SVG}text")]
    assert all(draw.short_number(peak) in shown for peak in simulation.peaks)


def test_numbers_stand_in_boxes_with_room() -> None:
    for case, all_of_them in (("1f1b", True), ("dense", False)):
        found = boxes(ElementTree.fromstring(draw.svg(CASES[case]())))
        labels = [box.find(f"{SVG}text") for box in found]
        assert all(label is not None for label in labels) == all_of_them


def test_text_is_escaped() -> None:
    evil = '<script>alert("&")</script>'
    simulation = simulated(replace(build("1f1b", 2, 2), name=evil))
    picture = ElementTree.fromstring(
        draw.svg(simulation, note=evil, unit=evil, memory=evil)
    )
    assert (
        sum(
            evil in (node.text or "").replace("<Script", "<script")
            for node in picture.iter(f"{SVG}text")
        )
        >= 3
    )
    page = draw.html(simulation, note=evil, unit=evil, memory=evil)
    assert evil not in page and "<script>alert" not in page


def page_data(page: str) -> dict[str, Any]:
    found = re.search(r"^const data = (.*);$", page, re.MULTILINE)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_page_stands_alone_and_knows_every_action(simulation: Simulation) -> None:
    page = draw.html(simulation, unit="ms")
    assert "{{" not in page
    references = re.findall(
        r"""(?:src|href|@import|url)\s*[=(]\s*["']?([^"')\s>]+)""", page
    )
    assert all(reference.startswith("#") for reference in references)
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) == {
        "http://www.w3.org/2000/svg"
    }
    data = page_data(page)
    timed = [t for rank in simulation.timeline for t in rank]
    assert [row[:1] + row[2:6] for row in data["actions"]] == [
        [t.action.rank, t.action.stage, t.action.microbatch, t.start, t.end]
        for t in timed
    ]
    peaks = re.findall(r"<td>([^<]*)</td></tr>", page)
    assert peaks == [draw.short_number(peak) for peak in simulation.peaks]
    reads = {
        word
        for row in data["actions"]
        for read in row[6]
        for word in [read.split(" ", 2)[1]]
    }
    assert reads == ({"from", "on"} if len(simulation.timeline) > 1 else {"on"})


@pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"
)
def test_a_phone_shows_all_of_the_page(tmp_path: Path) -> None:
    path = tmp_path / "schedule.html"
    path.write_text(draw.html(CASES["interleaved"](), unit="ms"))
    seen = (
        "[...d.querySelectorAll('%s')].map((node) => node.getBoundingClientRect().%s)"
    )
    found = measured(path, 390, {
        "wide": "d.documentElement.scrollWidth", "table": "d.querySelector('table').getBoundingClientRect().right",
        "names": seen % ("#view svg > text", "left"), "ends": seen % ("#view svg > text", "right"),
        "lane": seen % (".lane", "width"), "error": "d.documentElement.dataset.error ?? ''",
    })  # fmt: skip
    assert found["wide"] == 390 and found["table"] <= 390 and not found["error"]
    assert (
        min(found["lane"]) > 200
        and max(found["ends"]) <= 390
        and min(x for x in found["names"] if x) > 0
    )


def test_trace_has_a_slice_per_action_and_an_arrow_per_move(
    simulation: Simulation,
) -> None:
    events = json.loads(json.dumps(draw.perfetto(simulation)))["traceEvents"]
    by = {ph: [e for e in events if e["ph"] == ph] for ph in "XCMsfbe"}
    timed = [t for rank in simulation.timeline for t in rank]
    assert [(e["tid"], e["ts"], e["dur"]) for e in by["X"]] == [
        (t.action.rank, t.start * 1000, pytest.approx((t.end - t.start) * 1000))
        for t in timed
    ]
    assert {e["args"]["name"] for e in by["M"] if e["name"] == "thread_name"} == {
        f"rank {r}" for r in range(len(simulation.timeline))
    }
    assert max(e["args"]["level"] for e in by["C"]) == max(simulation.peaks)
    assert len(by["s"]) == len(by["f"]) == len(simulation.moves)
    taken = sum(end > start for *_, start, end in simulation.moves)
    assert len(by["b"]) == len(by["e"]) == taken
    # Every arrow leaves within a slice of its rank and ends at the start of one.
    for e in by["s"]:
        assert any(
            x["tid"] == e["tid"] and x["ts"] <= e["ts"] < x["ts"] + x["dur"]
            for x in by["X"]
        )
    for e in by["f"]:
        assert any(x["tid"] == e["tid"] and x["ts"] == e["ts"] for x in by["X"])


def test_unknown_kinds_get_colours_of_their_own_and_keep_them() -> None:
    def table(*kinds: str) -> Table:
        return Table(
            "open", (tuple(Action(0, kind, 0, 0) for kind in kinds),), 1, ((0,),)
        )

    found = draw.colours(table("F", "W", "vocab", "<head>"))
    assert len(set(found.values())) == 4 and list(found)[:2] == ["F", "W"]
    assert draw.colours(table("vocab")) == {
        "vocab": draw.colours(table("F", "B", "vocab"))["vocab"]
    }
    ElementTree.fromstring(draw.svg(simulated(table("F", "W", "vocab", "<head>"))))
    many = draw.colours(table(*(f"K{i}" for i in range(20))))
    assert len(many) == 20


def test_shades_tell_the_stages_of_a_rank() -> None:
    shade, count, _ = draw.shades_of(v_table())
    assert count == 2 and {key[:2]: s for key, s in shade.items()} == {
        (0, 0): 0,
        (0, 3): 1,
        (1, 1): 0,
        (1, 2): 1,
    }
    assert draw.shades_of(build("1f1b", 4, 4))[1] == 1


def test_text_contrasts_with_its_box() -> None:
    def luminance(colour: str) -> float:
        parts = [c / 255 for c in bytes.fromhex(colour[1:])]
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in [kind.colour for kind in KINDS.values() if kind.colour] + list(
        draw.PALETTE
    ):
        for shade in range(4):
            for dark in (False, True):
                low, high = sorted(map(luminance, draw.shaded(colour, shade, 4, dark)))
                assert (high + 0.05) / (low + 0.05) >= 4.2, (colour, shade, dark)


@pytest.mark.parametrize("end", [0.003, 1.0, 9.99, 33.0, 1e6])
def test_ticks_are_round_and_a_dozen(end: float) -> None:
    found = draw.ticks(end)
    assert found[0] == 0 and found[-1] <= end * (1 + 1e-9) and 5 <= len(found) <= 14
