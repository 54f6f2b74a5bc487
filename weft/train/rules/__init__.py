"""Shared parts of the update rules of optimizers; a rule updates the parameters of one unit of the state at a time."""
