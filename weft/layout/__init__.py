"""Named dimensions, mesh axes and the one value that maps the first to the second."""
