"""The driver ucx over TCP."""
