"""The search space: how it is written, sampled and restricted, and what is searched by default."""
