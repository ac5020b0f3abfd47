"""Copies of what a verb made, in an object store: `artifacts.uri`."""
