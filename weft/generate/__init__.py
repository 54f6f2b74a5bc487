"""Text from a model on one device."""
