"""A model becomes its shard."""
