"""One real step of one rank, counted and timed, for a prediction of what a layout takes on a machine at hand."""
