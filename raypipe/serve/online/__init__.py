"""Online serving: the champion behind HTTP, on Ray Serve (server.py says how)."""
