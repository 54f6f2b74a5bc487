"""Attention over a sequence that is cut along ``cp``: a table of tiles, heads exchanged around it, or both.

:mod:`scheme` is the interface of schemes (``weft/techniques/context/``), :mod:`tables` what they give,
:mod:`tile_attention` the operator that runs it, :mod:`heads` the exchange. With both (USP, Fang & Zhao 2024,
2405.07719) heads are exchanged among neighbours and the table runs over what is left of cp.
"""
