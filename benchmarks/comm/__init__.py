"""``bench comm`` and ``plan --validate``: collectives between processes of this machine."""
