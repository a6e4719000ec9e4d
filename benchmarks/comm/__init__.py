"""``bench comm``: collectives between processes of this machine."""
