"""How to train a model on given devices: layouts searched by their predicted step, and the run file of the best."""
