resource "azurerm_resource_group" "this" {
  name     = "rg-${local.name}"
  location = var.location
  tags     = local.tags

  lifecycle {
    prevent_destroy = true
  }
}

module "network" {
  source = "../network"

  address_space       = var.address_space
  location            = var.location
  name                = local.name
  resource_group_name = azurerm_resource_group.this.name
  tags                = local.tags
}

module "storage" {
  source = "../storage"

  account_name         = "st${var.project}${var.environment}${var.storage_suffix}"
  endpoint_subnet_id   = module.network.endpoint_subnet_id
  location             = var.location
  log_days             = var.settings.log_days
  name                 = local.name
  private_dns_zone_ids = module.network.private_dns_zone_ids
  replication          = var.settings.replication
  resource_group_name  = azurerm_resource_group.this.name
  restore_days         = var.settings.restore_days
  tags                 = local.tags
}

module "workspace" {
  source = "../workspace"

  cluster_subnet_association_ids = module.network.cluster_subnet_association_ids
  cluster_subnet_names           = module.network.cluster_subnet_names
  container_ids                  = module.storage.container_ids
  location                       = var.location
  managed_resource_group_name    = local.managed_resource_group_name
  metastore_id                   = var.metastore_id
  name                           = local.name
  resource_group_name            = azurerm_resource_group.this.name
  serverless                     = var.settings.serverless
  storage_account_id             = module.storage.account_id
  tags                           = local.tags
  virtual_network_id             = module.network.virtual_network_id

  providers = {
    azurerm            = azurerm
    databricks.account = databricks.account
  }
}

module "access" {
  source = "../access"

  databricks_account_id = var.databricks_account_id
  deployer_client_id    = var.deployer_client_id
  name                  = local.name
  workspace_id          = module.workspace.workspace_id

  providers = {
    databricks.account   = databricks.account
    databricks.workspace = databricks.workspace
  }
}

module "catalog" {
  source = "../catalog"

  catalog_name           = "${var.project}_${var.environment}"
  container_urls         = module.storage.container_urls
  deployer_client_id     = var.deployer_client_id
  group_names            = module.access.group_names
  jobs_application_id    = module.access.jobs_application_id
  metastore_id           = module.workspace.metastore_id
  name                   = local.name
  storage_connector_id   = module.workspace.storage_connector_id
  telemetry_connector_id = module.workspace.telemetry_connector_id

  providers = {
    databricks = databricks.workspace
  }
}

module "policies" {
  source = "../policies"

  cpu_node_types            = var.settings.cpu_node_types
  environment               = var.environment
  gpu_node_types            = var.settings.gpu_node_types
  jobs_application_id       = module.access.jobs_application_id
  max_dbu_per_hour          = var.settings.max_dbu_per_hour
  max_workers               = var.settings.max_workers
  name                      = local.name
  runtimes                  = [var.settings.gpu_runtime, var.settings.cpu_runtime]
  telemetry_credential_name = module.catalog.telemetry_credential_name
  user_group_name           = module.access.group_names["engineers"]

  providers = {
    databricks = databricks.workspace
  }
}

module "cluster" {
  source = "../cluster"

  cpu_runtime         = var.settings.cpu_runtime
  environment         = var.environment
  gpu_runtime         = var.settings.gpu_runtime
  interactive         = var.settings.interactive
  jobs_application_id = module.access.jobs_application_id
  name                = local.name
  policy_ids          = module.policies.ids
  pools               = var.settings.pools
  user_group_name     = module.access.group_names["engineers"]

  providers = {
    databricks = databricks.workspace
  }
}

module "sql_warehouse" {
  source = "../sql_warehouse"

  auto_stop_minutes   = var.settings.auto_stop_minutes
  environment         = var.environment
  group_names         = module.access.group_names
  jobs_application_id = module.access.jobs_application_id
  max_clusters        = var.settings.max_sql_clusters
  name                = local.name
  serverless          = var.settings.serverless
  size                = var.settings.sql_size

  providers = {
    databricks = databricks.workspace
  }
}

module "monitoring" {
  source = "../monitoring"

  alert_emails           = var.alert_emails
  budget_amount          = var.budget_amount
  budget_resource_groups = [azurerm_resource_group.this.name, module.workspace.managed_resource_group_name]
  budget_start           = var.budget_start
  daily_quota_gb         = var.settings.daily_quota_gb
  location               = var.location
  name                   = local.name
  resource_group_name    = azurerm_resource_group.this.name
  retention_days         = var.settings.retention_days
  senders                = { clusters = module.workspace.telemetry_principal_id }
  subscription_id        = var.subscription_id
  tags                   = local.tags
  workspace_id           = module.workspace.id
}
