"""An engine over several ranks: rank 0 schedules, the others run the same plans on their shards of the model."""
