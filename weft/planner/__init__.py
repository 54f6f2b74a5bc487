"""Time and memory of a layout before anything runs: see docs/explanations/planner.md."""
