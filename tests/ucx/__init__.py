"""What needs UCX: the driver, and the commands beside it."""
