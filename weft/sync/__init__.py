"""How replicas of a model agree on one gradient, or on one set of weights."""
