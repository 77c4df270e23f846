"""A step of a model as a picture: what was traced beside what runs, one layer in full and the whole model."""
