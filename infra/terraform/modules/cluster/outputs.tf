output "pool_ids" {
  description = "Id of each pool. Known once jobs may use them. The bundle's job clusters name them."
  value       = { for kind, pool in databricks_instance_pool.this : kind => pool.id }
  depends_on  = [databricks_permissions.pool]
}

output "interactive_cluster_id" {
  description = "Id of the cluster for people, or null where there is none."
  value       = one(databricks_cluster.interactive[*].id)
}

output "probe_job_ids" {
  description = "Id of the job that tries out a cluster of each kind: cpu, gpu."
  value       = { for kind, job in databricks_job.probe : kind => job.id }
}
