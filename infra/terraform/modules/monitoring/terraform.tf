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
  }
}
