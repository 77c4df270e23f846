"""Text to token ids and back: tokenizers, chat templates, and the killable processes that run foreign code."""
