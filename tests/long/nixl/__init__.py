"""The driver nixl without its progress thread."""
