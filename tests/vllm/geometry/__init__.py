"""Every asymmetry of two engines, through endpoints, with caches that vLLM lays out."""
