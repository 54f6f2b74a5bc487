"""Saving and loading a run's state in logical coordinates, so that any layout can pick it up."""
