"""The exact bytes that engines, and their drivers, exchange; see ``test_pinned_bytes``."""
