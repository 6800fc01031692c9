"""The conformance suite on correct drivers, and on drivers with planted faults."""
