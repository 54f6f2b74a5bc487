"""Weft: plan, run, prove and checkpoint the training of large models on whatever devices there are."""

__version__ = "0.1.0"
