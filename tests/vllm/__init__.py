"""What needs vLLM, and no engine of it."""
