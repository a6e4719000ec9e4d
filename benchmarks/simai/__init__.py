"""``make simai``: the model of ``plan``, compared with a cluster simulator."""
