"""Mesh axes: their names, the named dimensions that each axis cuts, and the axes whose ranks see different data."""

#: Mesh axes from the slowest links to the fastest: neighbours along ``tp`` have consecutive ranks. Their sizes multiply
#: to the number of ranks. Ranks of different islands do not take a step together.
AXES = ("island", "pp", "dp", "shard", "cp", "tp")

#: An axis that is folded over the data axes: its ranks are some of theirs, so it adds none.
FOLDED = "ep"

#: Which axes cut which named dimension of a parameter. Everything else (``embed``, ``head_dim``) stays whole over them;
#: the rows of what is left are cut once more over the ranks that share in holding the state.
CUTS: dict[str, tuple[str, ...]] = {
    "vocab": ("tp",),
    "heads": ("tp",),
    "kv_heads": ("tp",),
    "ffn": ("tp",),
    "expert": ("ep",),
}

#: Axes over which the sequences of a step are dealt out.
BATCH_AXES = ("island", "dp", "shard")

#: Axes with process groups, beside the folded ``ep``. No process group crosses ``island``.
LIVE_AXES = ("pp", "dp", "shard", "cp", "tp")

#: Axes whose ranks see different data, so that parameter gradients are summed over them.
DATA_AXES = ("dp", "shard", "cp")

#: Axes whose ranks share the work on the same data: what they do not cut, each computes a part of the gradient of.
MODEL_AXES = ("tp",)
