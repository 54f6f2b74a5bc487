"""Reinforcement learning: a run whose samples are answers that the policy itself has just written."""
