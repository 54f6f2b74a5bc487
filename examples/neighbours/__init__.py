"""Mini-batches of a graph by neighbour sampling, whose features are gathered as unique sorted rows."""
