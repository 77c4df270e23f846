"""Text to requests and back: OpenAI's HTTP API over an engine in another process."""
