"""One real step of one rank, counted and timed, to predict the time of a layout on a probed machine."""
