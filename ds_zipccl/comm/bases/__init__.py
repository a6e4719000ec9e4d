"""Bases of gathers: their memory, and the state of the parameters that have them."""
