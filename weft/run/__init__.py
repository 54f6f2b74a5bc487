"""How processes become ranks of a run, and how they end."""
