"""How replicas of a model come to one gradient, or to one set of weights."""
