"""More of real engines: other shapes, faults, and what takes long to happen."""
