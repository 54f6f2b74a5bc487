"""Conversations as training data: read from any common format, rendered by a chat template, with labels on a part."""
