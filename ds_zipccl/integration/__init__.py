"""Everything that knows DeepSpeed."""
