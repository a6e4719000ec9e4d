"""Gathers as differences against what receivers hold."""
