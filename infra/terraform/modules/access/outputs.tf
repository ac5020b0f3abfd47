output "group_names" {
  description = "Name of each group: engineers, operators, readers. Known once the workspace knows them."
  value       = { for key, group in databricks_group.this : key => group.display_name }
  depends_on  = [databricks_entitlements.group]
}

output "jobs_application_id" {
  description = "Application id of the service principal that jobs run as, the bundle's variable service_principal. Known once the deployer may use it."
  value       = databricks_service_principal.jobs.application_id
  depends_on  = [databricks_entitlements.jobs, databricks_access_control_rule_set.jobs]
}
