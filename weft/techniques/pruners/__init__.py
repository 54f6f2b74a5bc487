"""Ways of pruning, which choose the elements of a weight that become zero, one file each."""
