"""How to serve a model on given devices under objectives of latency: layouts, their steps, their memory, the best."""
