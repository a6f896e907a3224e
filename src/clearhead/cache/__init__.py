"""Caches of keys and values: what is kept of a stream, in which form, and at which cost."""
