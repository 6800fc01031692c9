"""``make serve``, and the deployments in ``examples/serving``."""
