resource "azurerm_databricks_workspace" "this" {
  # checkov:skip=CKV_AZURE_158:CI and people reach the workspace over the internet, with Entra tokens only; close it when both are in the network
  # checkov:skip=CKV2_AZURE_48:Microsoft's keys for the workspace's root storage; no data of raypipe is in it
  name                                  = "dbw-${var.name}"
  location                              = var.location
  resource_group_name                   = var.resource_group_name
  managed_resource_group_name           = var.managed_resource_group_name
  sku                                   = "premium" # Unity Catalog, policies and access control need it
  public_network_access_enabled         = true
  network_security_group_rules_required = "AllRules"
  infrastructure_encryption_enabled     = true
  tags                                  = var.tags

  custom_parameters {
    no_public_ip                                         = true
    virtual_network_id                                   = var.virtual_network_id
    public_subnet_name                                   = var.cluster_subnet_names["host"]
    private_subnet_name                                  = var.cluster_subnet_names["container"]
    public_subnet_network_security_group_association_id  = var.cluster_subnet_association_ids["host"]
    private_subnet_network_security_group_association_id = var.cluster_subnet_association_ids["container"]
  }

  # MLflow runs and experiments live in the workspace.
  lifecycle {
    prevent_destroy = true
  }
}

resource "databricks_metastore_assignment" "this" {
  provider = databricks.account

  workspace_id = azurerm_databricks_workspace.this.workspace_id
  metastore_id = var.metastore_id
}

# Two identities, because each may do one thing: read and write tables, or send records to Azure Monitor.
resource "azurerm_databricks_access_connector" "storage" {
  name                = "dbac-${var.name}-storage"
  location            = var.location
  resource_group_name = var.resource_group_name
  tags                = var.tags

  identity {
    type = "SystemAssigned"
  }
}

resource "azurerm_databricks_access_connector" "telemetry" {
  name                = "dbac-${var.name}-telemetry"
  location            = var.location
  resource_group_name = var.resource_group_name
  tags                = var.tags

  identity {
    type = "SystemAssigned"
  }
}

resource "azurerm_role_assignment" "storage" {
  for_each = var.container_ids

  scope                = each.value
  role_definition_name = "Storage Blob Data Contributor"
  principal_id         = azurerm_databricks_access_connector.storage.identity[0].principal_id
  principal_type       = "ServicePrincipal"
}

# Unity Catalog signs short-lived tokens for one path; for that the identity needs this role on the account.
resource "azurerm_role_assignment" "delegator" {
  scope                = var.storage_account_id
  role_definition_name = "Storage Blob Delegator"
  principal_id         = azurerm_databricks_access_connector.storage.identity[0].principal_id
  principal_type       = "ServicePrincipal"
}

# Serverless compute runs in Databricks' network, and the account lets nobody in from outside. Somebody must approve the
# endpoints on the storage account once: README, "Cloud only".
resource "databricks_mws_network_connectivity_config" "this" {
  count    = var.serverless ? 1 : 0
  provider = databricks.account

  name   = "ncc-${var.name}"
  region = var.location
}

resource "databricks_mws_ncc_private_endpoint_rule" "storage" {
  for_each = local.serverless_services
  provider = databricks.account

  network_connectivity_config_id = databricks_mws_network_connectivity_config.this[0].network_connectivity_config_id
  resource_id                    = var.storage_account_id
  group_id                       = each.key
}

resource "databricks_mws_ncc_binding" "this" {
  count    = var.serverless ? 1 : 0
  provider = databricks.account

  network_connectivity_config_id = databricks_mws_network_connectivity_config.this[0].network_connectivity_config_id
  workspace_id                   = azurerm_databricks_workspace.this.workspace_id
}
