output "account_id" {
  description = "Id of the storage account."
  value       = azurerm_storage_account.this.id
}

output "container_ids" {
  description = "Id of each container, for role assignments no wider than one container."
  value       = { for name, container in azurerm_storage_container.this : name => container.id }
}

output "container_urls" {
  description = "abfss:// address of each container: tables, models and logs."
  value = {
    for name, container in azurerm_storage_container.this :
    name => "abfss://${container.name}@${azurerm_storage_account.this.primary_dfs_host}/"
  }
}
