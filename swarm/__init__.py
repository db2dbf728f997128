"""The floor that peers, clients and exporters stand on."""

__version__ = "0.1.0"
