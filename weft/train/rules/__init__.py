"""Rules by which optimizers update parameters, a unit of the state at a time."""
