output "bundle_variables" {
  description = "What the bundle of infra/databricks asks for, by the names of its variables, and the ids that its resources use."
  value = {
    host                      = module.workspace.url
    catalog                   = module.catalog.catalog_name
    storage                   = trimsuffix(module.catalog.location_urls["tables"], "/")
    logs                      = trimsuffix(module.catalog.location_urls["logs"], "/")
    service_principal         = module.access.jobs_application_id
    viewers                   = module.access.group_names["readers"]
    warehouse_id              = module.sql_warehouse.id
    policy_ids                = module.policies.ids
    pool_ids                  = module.cluster.pool_ids
    telemetry_credential_name = module.catalog.telemetry_credential_name
  }
}

output "sink" {
  description = "What the Azure Monitor sink is configured with. None of it is a secret."
  value = {
    endpoint      = module.monitoring.logs_endpoint
    rule          = module.monitoring.rule_immutable_id
    streams       = module.monitoring.stream_names
    log_analytics = module.monitoring.log_workspace_id
  }
}

output "outbound_ip" {
  description = "The one public address that clusters call out from."
  value       = module.network.outbound_ip
}

output "probes" {
  description = "Jobs and cluster to try out after an apply."
  value = {
    jobs        = module.cluster.probe_job_ids
    interactive = module.cluster.interactive_cluster_id
  }
}

output "workspace_url" {
  description = "Address of the workspace. The provider databricks.workspace is configured with it."
  value       = module.workspace.url
}
