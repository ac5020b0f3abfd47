terraform {
  required_version = ">= 1.11, < 2"

  required_providers {
    azurerm = {
      source  = "hashicorp/azurerm"
      version = ">= 5.10, < 6"
    }
  }

  # The first apply makes the account that this state moves into: README, step 1 and 2.
  backend "azurerm" {
    container_name   = "bootstrap"
    key              = "raypipe-bootstrap.tfstate"
    use_azuread_auth = true
  }
}
