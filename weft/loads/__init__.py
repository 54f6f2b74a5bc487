"""Streams of requests with which an engine is measured."""
