"""Schemes for attention over ``cp`` by ``layout.context`` (:class:`weft.parallel.context.scheme.AttentionScheme`)."""
