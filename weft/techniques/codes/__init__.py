"""Gradient codes (:class:`weft.sync.coded.Code`), with which a step need not wait for late ranks.

``resilience.code`` names them.
"""
