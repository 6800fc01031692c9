"""The driver ucx between two networks, and over a link that is cut."""
