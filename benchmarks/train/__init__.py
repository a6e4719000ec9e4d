"""``bench train`` and ``bench doctor``: whole training runs."""
