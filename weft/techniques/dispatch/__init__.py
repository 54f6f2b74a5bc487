"""Ways of tokens to experts of other ranks, by ``layout.dispatch`` (:class:`weft.parallel.experts.way.DispatchWay`)."""
