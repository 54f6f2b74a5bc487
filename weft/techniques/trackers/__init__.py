"""Trackers (:class:`weft.observe.trackers.Tracker`), which ``observe.trackers`` names by their packages."""
