"""Peers behind address translation: whoever has an invitation joins, over any network, and shares checkpoints.

On iroh (QUIC between endpoints that are named by their public keys); the relay is our own, and nothing on the public
internet is asked for anything.
"""
