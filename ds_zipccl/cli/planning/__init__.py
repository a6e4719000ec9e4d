"""The parts of a planned step: its operations, their times, and the speeds they are computed from."""
