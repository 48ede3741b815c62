"""Which row an ordinal gets: a permutation per epoch, computed one element at a time.

Nothing is stored, so it costs the same for ten rows and for 2**40, and two processes agree without talking. The
permutation is a Feistel network on the smallest even number of bits that holds all rows; a value that falls outside
the rows is put through the network again until it is inside (cycle-walking). Source: J. Black and P. Rogaway, "Ciphers
with Arbitrary Finite Domains", CT-RSA 2002 (cycle-walking, Feistel); the round function here is keyed blake2b.
"""

from __future__ import annotations

from hashlib import blake2b

ROUNDS = 8  # 4 suffice on a large domain (Luby and Rackoff 1988); small ones need more to mix
HALF_BYTES = 32  # of a round's output: either half of a value may have 256 bits


def row_index(ordinal: int, rows: int, *, seed: int, shuffle: bool) -> int:
    """The row of the prompt with this ordinal, 0 <= result < rows. Every row occurs once in every `rows` ordinals.

    Pure in its arguments. The order differs from epoch to epoch and from seed to seed; without `shuffle` it is file
    order. Raises ValueError for a negative ordinal or no rows.
    """
    if ordinal < 0 or rows < 1:
        raise ValueError(f"ordinal {ordinal} of {rows} rows: the ordinal must be >= 0, and there must be a row")
    epoch, position = divmod(ordinal, rows)
    return permute(position, rows, key=f"order/{seed}/{epoch}") if shuffle else position


def permute(position: int, size: int, *, key: str) -> int:
    """Where the permutation of range(size) named by `key` sends `position`. Raises ValueError outside the range."""
    if not 0 <= position < size <= 1 << (2 * 8 * HALF_BYTES):
        raise ValueError(f"position {position} is not in range({size}), or the range has more than 2**512 values")
    half_bits = ((size - 1).bit_length() + 1) // 2
    digest = blake2b(key.encode(), digest_size=32).digest()
    value = _feistel(position, half_bits, digest)
    while value >= size:  # the domain is less than 4 x size, so on average fewer than four turns
        value = _feistel(value, half_bits, digest)
    return value


def _feistel(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_number in range(ROUNDS):
        message = bytes([round_number]) + right.to_bytes(HALF_BYTES, "big")
        mixed = int.from_bytes(blake2b(message, key=key, digest_size=HALF_BYTES).digest(), "big")
        left, right = right, left ^ (mixed & mask)
    return left << half_bits | right
