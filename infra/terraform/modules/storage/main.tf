resource "azurerm_storage_account" "this" {
  # checkov:skip=CKV_AZURE_33:no queue is used; the queue endpoint has no private endpoint and public access is off
  # checkov:skip=CKV_AZURE_206:replication is a variable, and a sandbox needs one copy only
  # checkov:skip=CKV2_AZURE_1:Microsoft's keys; a key of one's own makes a lost key lost data, which each company decides itself
  name                              = var.account_name
  location                          = var.location
  resource_group_name               = var.resource_group_name
  account_kind                      = "StorageV2"
  account_tier                      = "Standard"
  account_replication_type          = var.replication
  is_hns_enabled                    = true # abfss:// needs directories; without it a rename copies
  min_tls_version                   = "TLS1_2"
  https_traffic_only_enabled        = true
  shared_access_key_enabled         = false # Entra only: a key is a secret that opens everything
  default_to_oauth_authentication   = true
  local_user_enabled                = false
  public_network_access_enabled     = false
  allow_nested_items_to_be_public   = false
  cross_tenant_replication_enabled  = false
  infrastructure_encryption_enabled = true
  tags                              = var.tags

  # An account with directories has no versions; deleted blobs can be restored.
  blob_properties {
    delete_retention_policy {
      days = var.restore_days
    }

    container_delete_retention_policy {
      days = var.restore_days
    }
  }

  network_rules {
    default_action = "Deny"
    bypass         = ["AzureServices"]
  }

  sas_policy {
    expiration_period = "00.01:00:00" # no key, so only user delegation; and that for an hour
    expiration_action = "Log"
  }

  lifecycle {
    prevent_destroy = true
  }
}

# Made through Azure's management plane: the machine that runs Terraform does not reach the account's data.
resource "azurerm_storage_container" "this" {
  # checkov:skip=CKV2_AZURE_21:reads are logged by Unity Catalog's audit log, which names the user; the account's log names its identity
  for_each = local.containers

  name                  = each.key
  storage_account_id    = azurerm_storage_account.this.id
  container_access_type = "private"

  lifecycle {
    prevent_destroy = true
  }
}

# Only logs are deleted by age. A Delta log names its files: a rule that deleted old ones would break tables. VACUUM does that.
resource "azurerm_storage_management_policy" "this" {
  storage_account_id = azurerm_storage_account.this.id

  rule {
    name    = "delete-old-logs"
    enabled = true

    filters {
      blob_types   = ["blockBlob", "appendBlob"]
      prefix_match = ["${azurerm_storage_container.this["logs"].name}/"]
    }

    actions {
      base_blob {
        delete_after_days_since_modification_greater_than = var.log_days
      }
    }
  }
}

resource "azurerm_private_endpoint" "this" {
  for_each = var.private_dns_zone_ids

  name                = "pep-${var.name}-${each.key}"
  location            = var.location
  resource_group_name = var.resource_group_name
  subnet_id           = var.endpoint_subnet_id
  tags                = var.tags

  private_service_connection {
    name                           = "psc-${var.name}-${each.key}"
    is_manual_connection           = false
    private_connection_resource_id = azurerm_storage_account.this.id
    subresource_names              = [each.key]
  }

  private_dns_zone_group {
    name                 = "default"
    private_dns_zone_ids = [each.value]
  }
}
