output "id" {
  description = "Azure resource id of the workspace."
  value       = azurerm_databricks_workspace.this.id
}

output "workspace_id" {
  description = "Databricks' own number of the workspace. Known once it has its metastore, so what asks for it waits for Unity Catalog."
  value       = databricks_metastore_assignment.this.workspace_id
}

output "metastore_id" {
  description = "Id of the metastore, known once the workspace has it: a catalog must wait for that."
  value       = databricks_metastore_assignment.this.metastore_id
}

output "url" {
  description = "Address of the workspace, https:// included."
  value       = "https://${azurerm_databricks_workspace.this.workspace_url}"
}

output "managed_resource_group_name" {
  description = "Resource group of the virtual machines: the budget counts it."
  value       = azurerm_databricks_workspace.this.managed_resource_group_name
}

output "storage_connector_id" {
  description = "Id of the access connector that reads and writes the containers. Known once its roles are assigned."
  value       = azurerm_databricks_access_connector.storage.id
  depends_on  = [azurerm_role_assignment.storage, azurerm_role_assignment.delegator]
}

output "telemetry_connector_id" {
  description = "Id of the access connector that sends records to Azure Monitor."
  value       = azurerm_databricks_access_connector.telemetry.id
}

output "telemetry_principal_id" {
  description = "Object id of the identity that sends records to Azure Monitor."
  value       = azurerm_databricks_access_connector.telemetry.identity[0].principal_id
}
