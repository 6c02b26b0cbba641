"""Which gradients travel together; a pure plan that is the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence


def plan_buckets(sizes_bytes: Sequence[int], bucket_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Buckets of gradient indices, in the order in which they leave: the last layer's first.

    Back-propagation makes the last layer's gradient first, so the reverse of the layer order is sent as it comes. A
    bucket is closed before it would exceed `bucket_bytes`. A tensor of at least that size is a bucket of its own,
    which saves its copy.
    """
    if bucket_bytes < 1:
        raise ValueError(f"a bucket of {bucket_bytes} bytes holds nothing")
    buckets: list[tuple[int, ...]] = []
    current: list[int] = []
    filled = 0
    for index in reversed(range(len(sizes_bytes))):
        size = sizes_bytes[index]
        if current and filled + size > bucket_bytes:
            buckets.append(tuple(current))
            current, filled = [], 0
        current.append(index)
        filled += size
    if current:
        buckets.append(tuple(current))
    return tuple(buckets)
