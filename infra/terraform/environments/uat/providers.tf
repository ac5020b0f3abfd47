# Who calls is never written here: a person's `az login`, or CI's OIDC token (ARM_USE_OIDC and ARM_CLIENT_ID).
provider "azurerm" {
  subscription_id     = var.subscription_id
  storage_use_azuread = true # the account takes no keys

  features {
    resource_group {
      prevent_deletion_if_contains_resources = true
    }

    # The account's data is reached from the stage's network only, and Terraform runs elsewhere.
    storage {
      data_plane_available = false
    }
  }
}

provider "azapi" {
  subscription_id = var.subscription_id
}

# The account (identities, metastore, network) and the workspace (all else) have one provider each: an address of one
# answers nothing that is asked of the other.
provider "databricks" {
  alias      = "account"
  host       = var.databricks_account_host
  account_id = var.databricks_account_id
}

provider "databricks" {
  alias = "workspace"
  host  = module.stage.workspace_url
}
