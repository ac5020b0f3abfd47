terraform {
  required_version = ">= 1.11, < 2"

  required_providers {
    azapi = {
      source  = "Azure/azapi"
      version = ">= 2.13, < 3"
    }
    azurerm = {
      source  = "hashicorp/azurerm"
      version = ">= 5.10, < 6"
    }
    databricks = {
      source                = "databricks/databricks"
      version               = ">= 1.138, < 2"
      configuration_aliases = [databricks.account, databricks.workspace]
    }
  }
}
