"""The numba route: the readable reference of every payload."""
