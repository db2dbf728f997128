"""The common packages of peers, clients and the exporter."""

__version__ = "0.1.0"
