"""Predicts, chooses and explains: how long steps take, how to run a model on given devices, where a run's time goes."""
