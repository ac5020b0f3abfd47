resource "databricks_cluster_policy" "this" {
  for_each = local.definitions

  name                  = "${var.name}-${each.key}"
  description           = "Clusters of kind ${each.key} for raypipe"
  definition            = jsonencode(each.value)
  max_clusters_per_user = each.key == "interactive" ? 1 : null # a person needs one
}

resource "databricks_permissions" "this" {
  for_each = databricks_cluster_policy.this

  cluster_policy_id = each.value.id

  access_control {
    service_principal_name = var.jobs_application_id
    permission_level       = "CAN_USE"
  }

  access_control {
    group_name       = var.user_group_name
    permission_level = "CAN_USE"
  }
}
