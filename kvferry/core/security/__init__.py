"""Access control: which tickets are genuine, and which peers are admitted by key and address.

The package has values and checks; the sockets that use them are in ``kvferry.core.handshake``. It
imports only the standard library, msgspec, ZMQ (for key pairs) and ``cryptography`` (for proofs).
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
