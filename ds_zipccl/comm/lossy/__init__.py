"""Frames and sums whose values a lossy codec changes."""
