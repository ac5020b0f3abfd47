terraform {
  required_version = ">= 1.11, < 2"

  required_providers {
    databricks = {
      source                = "databricks/databricks"
      version               = ">= 1.138, < 2"
      configuration_aliases = [databricks.account, databricks.workspace]
    }
  }
}
