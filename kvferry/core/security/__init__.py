"""Access control: secrets and proofs of tickets, keys that admit peers, and their addresses.

These are values and checks; the side channel's sockets are in ``kvferry.core.handshake``. Only the
standard library and msgspec are imported, except for key pairs (ZMQ) and proofs (``cryptography``).
"""

from kvferry.core.security.access import NEARBY, OPEN, Access
from kvferry.core.security.keys import KEY_BYTES, KeyPair, generate, public_keys
from kvferry.core.security.networks import Networks
from kvferry.core.security.proof import Proof, TicketKey
from kvferry.core.security.secret_sources import Secret, listed_keys, read_secret
from kvferry.core.security.signing import TicketSecrets

__all__ = [
    "KEY_BYTES",
    "NEARBY",
    "OPEN",
    "Access",
    "KeyPair",
    "Networks",
    "Proof",
    "Secret",
    "TicketKey",
    "TicketSecrets",
    "generate",
    "listed_keys",
    "public_keys",
    "read_secret",
]
