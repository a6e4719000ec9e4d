"""Gathers as differences whose frames stay on a device: sizes agreed ahead, proofs, bases in the output."""
