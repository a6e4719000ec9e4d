"""Gathers as differences whose frames stay on a device: sizes agreed ahead, and proofs."""
