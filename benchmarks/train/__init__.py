"""``bench train`` and ``doctor --check``: whole training runs."""
