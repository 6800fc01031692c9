"""Who may: secrets that sign tickets, keys that admit peers, and the addresses they may have.

Values and checks; the side channel's sockets are in ``kvferry.core.handshake``. Stdlib and msgspec
only, but for making key pairs, which asks ZMQ, and for proofs, which ask ``cryptography``.
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
