"""Views of a run: metrics, live display, model flops, time split of a step, and the report page."""
