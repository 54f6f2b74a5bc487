"""Search of better policies, with a simulator as judge."""
