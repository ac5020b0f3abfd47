output "logs_endpoint" {
  description = "Address that records are sent to. The sink's setting endpoint."
  value       = azurerm_monitor_data_collection_endpoint.this.logs_ingestion_endpoint
}

output "rule_immutable_id" {
  description = "Immutable id of the collection rule. The sink's setting rule. Known once the sender may send."
  value       = azurerm_monitor_data_collection_rule.this.immutable_id
  depends_on  = [azurerm_role_assignment.sender]
}

output "stream_names" {
  description = "Names of the streams: Custom-NAME_CL."
  value       = [for table in azapi_resource.table : "Custom-${table.name}"]
}

output "log_workspace_id" {
  description = "Id of the Log Analytics workspace, for queries."
  value       = azurerm_log_analytics_workspace.this.workspace_id
}
