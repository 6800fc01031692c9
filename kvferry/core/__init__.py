"""What to move, when, and whether it is valid. Knows no transport library, no torch, no vLLM."""
