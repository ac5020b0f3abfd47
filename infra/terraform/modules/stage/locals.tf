locals {
  name = "${var.project}-${var.environment}"

  tags = {
    project = var.project
    stage   = var.environment
    made_by = "terraform"
  }

  # A string of its own, because budget and workspace both need it before the workspace exists.
  managed_resource_group_name = "rg-${local.name}-databricks"
}
