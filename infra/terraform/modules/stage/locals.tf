locals {
  name = "${var.project}-${var.environment}"

  tags = {
    project = var.project
    stage   = var.environment
    made_by = "terraform"
  }

  # Databricks makes it and keeps its virtual machines there.
  managed_resource_group_name = "rg-${local.name}-databricks"
}
