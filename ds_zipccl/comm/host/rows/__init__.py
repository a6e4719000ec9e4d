"""Rows of expert messages that repeat earlier rows."""
