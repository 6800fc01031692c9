"""What needs Ray Serve LLM, in an environment of its own (``make ray``)."""
