"""What an endpoint's thread does with its driver: connections, reads, and what they may raise."""
