locals {
  # blob and dfs: model serving downloads a model version over both.
  serverless_services = toset(var.serverless ? ["blob", "dfs"] : [])
}
