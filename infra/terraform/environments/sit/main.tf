module "stage" {
  source = "../../modules/stage"

  address_space         = local.address_space
  alert_emails          = var.alert_emails
  budget_amount         = var.budget_amount
  budget_start          = var.budget_start
  databricks_account_id = var.databricks_account_id
  deployer_client_id    = var.deployer_client_id
  environment           = local.environment
  location              = var.location
  metastore_id          = var.metastore_id
  project               = var.project
  settings              = local.settings
  storage_suffix        = var.storage_suffix
  subscription_id       = var.subscription_id

  providers = {
    azapi                = azapi
    azurerm              = azurerm
    databricks.account   = databricks.account
    databricks.workspace = databricks.workspace
  }
}
