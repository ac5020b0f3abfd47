"""What is known of a registered version, question by question, and whether it is true.

`gather` collects records of the package, MLflow, the table, the moves, the decisions and the drift
checks, and tries what can be tried now. `questions` makes eight answers of them, and is pure.
`page` draws them.
"""
