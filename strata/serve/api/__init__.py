"""The routes of the API: from a checked request to prompts, and from the engine's tokens to replies."""
