"""reshard-cli gives inference jobs their new weights: exact, close to the network's limit, never hanging."""

__all__ = ["__version__"]

__version__ = "0.1.0"
