"""Dispatchers by ``layout.dispatch``: how tokens reach experts of other ranks.

Their interface is :class:`weft.parallel.experts.dispatch_way.DispatchWay`.
"""
