"""`plait bench`: loads any OpenAI-compatible server. Knows HTTP and nothing of the engine."""
