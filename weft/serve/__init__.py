"""A model over HTTP, as OpenAI's clients ask for it."""
