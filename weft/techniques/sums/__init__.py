"""All-reduces between ranks of ``tp`` that generate; ``layout.sum`` names them.

Each is a function of this rank's flat tensor ``x`` and its :class:`weft.net.rank_links.RankLinks`. It returns the sum
over all ranks, with the same bits on each of them.
"""
