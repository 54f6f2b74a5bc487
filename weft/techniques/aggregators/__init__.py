"""Rules that combine the gradients of replicas (:class:`weft.sync.aggregator.Aggregator`).

``resilience.aggregate`` names them.
"""
