"""The numba kernel backend: the readable reference of every payload."""
