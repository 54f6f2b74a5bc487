"""What a run tells: metrics, live display, model flops, time split of a step, and the report page."""
