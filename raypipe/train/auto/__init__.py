"""Settings that are `auto`: batch size and learning rate, found before the training."""
