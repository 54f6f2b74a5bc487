"""Policies of federated training (:class:`weft.federated.policy.FederationPolicy`); ``federated.policy`` names them."""
