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
      source  = "databricks/databricks"
      version = ">= 1.138, < 2"
    }
  }

  # The account comes from -backend-config. The key stands here, so that no command line can point one stage at
  # another one's state.
  backend "azurerm" {
    container_name   = "prod"
    key              = "raypipe-prod.tfstate"
    use_azuread_auth = true
  }
}
