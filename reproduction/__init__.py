"""The experiments behind the numbers in the documentation: `python -m reproduction`."""
