"""The one split rule: how elements are divided among ranks."""

from __future__ import annotations

import functools
from itertools import pairwise

from gradwire.errors import ConfigError

__all__ = ["partition"]


@functools.lru_cache(maxsize=1024)
def partition(size: int, parts: int, unit: int = 1) -> tuple[slice, ...]:
    """Slices of ``size`` elements, one a part: as equal as whole units allow, the longer ones first.

    With t = size // parts and e = size % parts, slice p begins at p * t + min(p, e) and has t + (p < e) elements. With
    a ``unit`` the rule is for units, the last of which may be incomplete. Slices may be empty.

    >>> partition(10, 4)
    (slice(0, 3, None), slice(3, 6, None), slice(6, 8, None), slice(8, 10, None))
    >>> partition(5000, 3, unit=1024)
    (slice(0, 2048, None), slice(2048, 4096, None), slice(4096, 5000, None))
    """
    if size < 0 or parts < 1 or unit < 1:
        raise ConfigError(
            f"`size` must not be negative, `parts` and `unit` must be at least 1; got {size}, {parts}, {unit}."
        )
    each, extra = divmod(-(-size // unit), parts)
    edges = [min(size, (part * each + min(part, extra)) * unit) for part in range(parts + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(edges))
