"""A model's text taken apart: content, reasoning and tool calls."""
