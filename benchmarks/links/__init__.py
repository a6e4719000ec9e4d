"""Slow networks between processes of this machine, and the backends that run over them."""
