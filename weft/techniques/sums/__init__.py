"""All-reduces between ranks of ``tp`` that generate; ``layout.sum`` names them.

Their interface is :class:`weft.layout.all_reduce.AllReduce`.
"""
