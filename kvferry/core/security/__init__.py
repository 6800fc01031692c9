"""Access control: which tickets are genuine, and which peers are admitted by key and address.

Values and checks, for the sockets in ``kvferry.core.side_channel``. The package imports only the
standard library, msgspec, ZMQ (for key pairs) and ``cryptography`` (for proofs).
"""

from kvferry.core.security.access import NEARBY, OPEN, Access, Networks, is_here
from kvferry.core.security.keys import KEY_BYTES, KeyPair, PeerKeys, generate, public_keys
from kvferry.core.security.secret_sources import FILE, Secret, listed_keys, read_secret
from kvferry.core.security.security_files import SecurityFiles
from kvferry.core.security.ticket_hmac import TicketSecrets
from kvferry.core.security.ticket_proof import Proof, TicketKey

__all__ = [
    "FILE",
    "KEY_BYTES",
    "NEARBY",
    "OPEN",
    "Access",
    "KeyPair",
    "Networks",
    "PeerKeys",
    "Proof",
    "Secret",
    "SecurityFiles",
    "TicketKey",
    "TicketSecrets",
    "generate",
    "is_here",
    "listed_keys",
    "public_keys",
    "read_secret",
]
