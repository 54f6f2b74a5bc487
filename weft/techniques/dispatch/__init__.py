"""Dispatchers, which send tokens to experts of other ranks; ``layout.dispatch`` names them.

Their interface is :class:`weft.parallel.experts.dispatch_way.DispatchWay`.
"""
