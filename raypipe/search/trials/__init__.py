"""What runs one trial on Ray Tune: its resources, checkpoints and reports."""
