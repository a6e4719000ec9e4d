"""Sends and receives between two ranks."""
