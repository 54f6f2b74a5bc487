"""Operators of data pipelines: a file each."""
