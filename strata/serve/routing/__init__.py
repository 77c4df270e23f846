"""Which of several replicas of an engine gets a request, by the prefixes that each holds and by its load."""
