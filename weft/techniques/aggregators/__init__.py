"""Rules by which gradients of replicas are combined (:class:`weft.sync.aggregator.Aggregator`)."""
