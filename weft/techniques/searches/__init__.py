"""Policies that ``weft search`` improves: what each may look at, and how it is judged."""
