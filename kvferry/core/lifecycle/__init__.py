"""The request protocol as state machines without I/O; callers pass the time, or a clock."""
