"""The route inspector: who serves what, as data and as a picture."""
