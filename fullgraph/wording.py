"""How counts stand in what people read."""

from __future__ import annotations


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 node``, ``2,000 nodes``; ``many`` is what stands after any other number than 1; by default ``one`` with s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def there_are(number: int, one: str, many: str | None = None) -> str:
    """``there is 1 node``, ``there are 2,000 nodes``."""
    return f"there {'is' if number == 1 else 'are'} {counted(number, one, many)}"
