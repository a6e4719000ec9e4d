"""One file per collective."""
