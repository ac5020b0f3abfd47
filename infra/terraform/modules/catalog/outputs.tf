output "catalog_name" {
  description = "Name of the catalog. The bundle's variable catalog."
  value       = databricks_catalog.this.name
}

output "location_urls" {
  description = "Address of each external location. Known once jobs may use them."
  value       = { for key, location in databricks_external_location.this : key => location.url }
  depends_on  = [databricks_grants.location]
}

output "telemetry_credential_name" {
  description = "Name of the service credential that sends records to Azure Monitor. Known once jobs may use it."
  value       = databricks_credential.telemetry.name
  depends_on  = [databricks_grants.telemetry]
}
