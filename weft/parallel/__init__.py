"""Wrappers that realise a layout around single-device code."""
