"""The picture of a command, one module each."""
