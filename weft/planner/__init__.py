"""Time and memory of a layout before anything runs: see docs/planner.md."""
