"""What the next trial tries: random, grid, Optuna's TPE and GP, BOHB."""
