"""Stand-ins for GPUs: CUDA's driver API, and torch's module of a kind of device."""
