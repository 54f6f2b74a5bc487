"""One training step for every layout, and the loop around it."""
