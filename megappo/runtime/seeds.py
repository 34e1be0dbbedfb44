"""Seeds that depend only on their purpose, and not on other random numbers."""

from __future__ import annotations

import hashlib


def derived_seed(*parts: int | str, bits: int = 63) -> int:
    """Return a seed of `bits` bits that depends only on `parts`. The seed is the same on every machine.

    The hash is BLAKE2b (RFC 7693) of the parts, with slashes between them.
    """
    size = -(-bits // 8)
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=size).digest()
    return int.from_bytes(digest, "little") >> (8 * size - bits)
