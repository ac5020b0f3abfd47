"""The command line: the typer app, its verbs, and what people see of them."""
