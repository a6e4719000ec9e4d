"""Roles with a lossy codec: the calls that they may change, and their state."""
