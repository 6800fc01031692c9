"""The request protocol as pure state machines: no I/O, no transport, an injected clock."""
