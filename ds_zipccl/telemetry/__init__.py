"""Counters of what was sent, and how they are shown."""
