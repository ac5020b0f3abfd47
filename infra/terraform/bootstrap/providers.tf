provider "azurerm" {
  subscription_id     = var.subscription_id
  storage_use_azuread = true # the account takes no keys

  # Nothing of the account's data is needed, so it may be closed to whoever bootstraps.
  features {
    storage {
      data_plane_available = false
    }
  }
}
