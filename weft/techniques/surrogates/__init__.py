"""Models that read arrays and predict arrays, in place of a simulation."""
