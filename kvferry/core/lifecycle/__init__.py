"""The request protocol as pure state machines: no I/O and no transport; callers pass the time."""
