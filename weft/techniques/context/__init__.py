"""Schemes of attention over the ranks of ``cp`` (:class:`weft.parallel.context.scheme.AttentionScheme`).

``layout.context`` names them.
"""
