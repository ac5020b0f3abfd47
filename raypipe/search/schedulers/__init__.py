"""Which trials continue, and for how long: halving, PBT and Ray Tune's own rules."""
