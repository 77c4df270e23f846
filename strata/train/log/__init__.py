"""The log of a run: JSON lines always, TensorBoard and Weights & Biases if asked for, and a picture at the end."""
