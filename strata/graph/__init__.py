"""A module becomes a fast callable that knows its own cost. Knows no model."""
