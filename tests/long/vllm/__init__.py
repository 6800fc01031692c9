"""What needs vLLM and no engine, and takes minutes."""
