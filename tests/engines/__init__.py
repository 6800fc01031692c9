"""Real vLLM engines that hand over to each other, and what tests do with them."""
