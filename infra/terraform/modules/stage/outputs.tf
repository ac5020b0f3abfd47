output "bundle_variables" {
  description = "What the bundle of infra/databricks asks for, by the names of its variables."
  value = {
    catalog    = module.catalog.catalog_name
    developers = module.access.group_names["engineers"]
    host       = module.workspace.url
    principal  = module.access.jobs_application_id
    storage    = trimsuffix(module.catalog.location_urls["tables"], "/")
    viewers    = module.access.group_names["readers"]
  }
}

output "platform" {
  description = "For clusters and queries of people: policies, pools, the warehouse, the credential of the sink, the place of logs."
  value = {
    logs                      = trimsuffix(module.catalog.location_urls["logs"], "/")
    policy_ids                = module.policies.ids
    pool_ids                  = module.cluster.pool_ids
    telemetry_credential_name = module.catalog.telemetry_credential_name
    warehouse_id              = module.sql_warehouse.id
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
