"""What needs NIXL: the driver, and the commands beside it."""
