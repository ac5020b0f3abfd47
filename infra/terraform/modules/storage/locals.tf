locals {
  # tables: Delta tables. models: the catalog's managed storage, so volumes (runs, packages) and model versions.
  # logs: cluster logs, which nobody reads after a while.
  containers = toset(["tables", "models", "logs"])
}
