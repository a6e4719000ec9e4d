"""The numba route, and the readable reference of every payload."""
