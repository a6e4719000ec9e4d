"""ZeRO: the parameters and owners behind a collective, which the call does not name."""
