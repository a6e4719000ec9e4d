"""The C++ kernel backend, a plain C interface called through ctypes."""
