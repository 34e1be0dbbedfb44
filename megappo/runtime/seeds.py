"""Seeds that follow from what they are for, whatever else is drawn before or beside it."""

from __future__ import annotations

import hashlib


def derived_seed(*parts: int | str, bits: int = 63) -> int:
    """A seed of so many bits that depends on these parts alone: the same on every machine, another for other parts
    (BLAKE2b, RFC 7693, of the parts with slashes between them)."""
    size = -(-bits // 8)
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=size).digest()
    return int.from_bytes(digest, "little") >> (8 * size - bits)
