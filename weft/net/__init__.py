"""How processes reach each other: addresses, connections, process groups, their time limits, and lost ranks."""
