"""Which codec where. For now: the best codec for a number of bytes."""

from gradwire.planner.budget import best_codec, relative_error

__all__ = ["best_codec", "relative_error"]
