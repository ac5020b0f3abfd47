output "ids" {
  description = "Id of each policy: interactive, single, gpu, cpu. Known once jobs and engineers may use them."
  value       = { for kind, policy in databricks_cluster_policy.this : kind => policy.id }
  depends_on  = [databricks_permissions.this]
}
