"""What a driver takes at sizes that two cores cannot run: `python -m benchmarks.scale --json`."""
