"""A model over HTTP, with OpenAI's interface."""
