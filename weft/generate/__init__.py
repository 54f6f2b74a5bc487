"""Text from a trained model, on one device or over several ranks."""
