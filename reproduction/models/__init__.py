"""The models that experiments run on."""
