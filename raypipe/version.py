"""Which raypipe this is, also where its code lies on the path without being installed."""

VERSION = "0.1.0"
