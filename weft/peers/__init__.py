"""Peers that cannot be reached: who has an invitation joins, whatever networks lie between, and shares checkpoints.

On iroh (QUIC between endpoints that are named by their public keys); the relay is our own, and nothing on the public
internet is asked for anything.
"""
