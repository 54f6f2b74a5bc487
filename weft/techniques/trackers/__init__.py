"""Trackers (:class:`weft.observe.trackers.Tracker`), to which a run's records are sent.

``observe.trackers`` names them by their packages.
"""
