"""A step of a model as a picture: what was captured beside what runs, one layer in full and the whole model."""
