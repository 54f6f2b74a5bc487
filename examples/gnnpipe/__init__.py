"""Pipelined training of graph networks (GNNPipe), on the public interfaces of :mod:`weft.schedule` alone."""
