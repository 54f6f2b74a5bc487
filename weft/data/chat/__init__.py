"""Conversations to learn from: read from any of the usual forms, written by a chat template, learned in part."""
