output "id" {
  description = "Id of the warehouse. Known once groups may use it. The bundle's queries, alert and dashboard run on it."
  value       = databricks_sql_endpoint.this.id
  depends_on  = [databricks_permissions.this]
}
