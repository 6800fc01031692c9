"""Describe vLLM's allocated caches as a ``Layout``: ``cache_layout.describe``, by tables."""
