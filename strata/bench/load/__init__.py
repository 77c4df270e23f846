"""Load for an HTTP server of OpenAI's API: what is asked and when, sending it, and what the answers' times come to."""
