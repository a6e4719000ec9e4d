"""Gathers as differences against a base that receivers hold."""
