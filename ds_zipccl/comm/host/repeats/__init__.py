"""Messages of a forward pass that recomputations repeat."""
