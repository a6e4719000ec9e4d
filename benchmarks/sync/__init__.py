"""``bench sync``: weight sync."""
