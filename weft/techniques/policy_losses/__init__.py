"""Methods of reinforcement learning, which ``rl.method`` names; each gives values to the parts of a policy loss."""
