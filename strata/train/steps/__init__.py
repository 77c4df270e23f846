"""A training step over any layout: passes over a rank's packs, the gradient's reduction and norm, the update."""
