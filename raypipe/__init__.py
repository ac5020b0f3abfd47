"""raypipe: image AutoML for Delta Lake, on Ray."""

__version__ = "0.1.0"
