"""What somebody gives to `LLM`, read before anything is loaded or run: options and prompts."""
