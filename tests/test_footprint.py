"""What a run does not use it does not import: the size of the core is held here."""

from __future__ import annotations

import pytest
from footprint import imported

from tests.techniques.test_leaves import hidden_modules


@pytest.mark.parametrize(("layout", "most"), [
    ("", 130_000),
    pytest.param("dp=2", 175_000, marks=pytest.mark.soak),
    pytest.param("dp=4", 175_000, marks=pytest.mark.soak),
])  # fmt: skip
def test_a_run_imports_no_more_than_it_uses(layout: str, most: int) -> None:
    """Of one process, which can import no technique but those that it names, and of ranks of its own.

    These hand their outcome back to Python, which is looked at there.
    """
    modules = imported(layout, () if layout else hidden_modules())
    assert {"api.py", "train/loop.py", "observe/run_page.py"} <= modules.keys()
    assert ("resilience/rank_life.py" in modules) == bool(layout)
    assert "resilience/island_life.py" not in modules
    total = sum(modules.values())
    assert total <= most, f"{total:,}; python bench/footprint.py has them by room"
