"""How frames travel between ranks."""
