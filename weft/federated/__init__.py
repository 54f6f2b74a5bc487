"""Federated training: clients that own their data, come when they like, and are nobody's ranks."""
