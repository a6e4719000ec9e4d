"""``make simai``: the model of ``plan`` and a simulator of clusters."""
