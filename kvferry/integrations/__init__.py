"""Connectors for serving engines. They import ``kvferry.core`` and nothing else of kvferry."""
