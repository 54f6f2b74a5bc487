"""Tasks whose answers get a reward, one file for each."""
