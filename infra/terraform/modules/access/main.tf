resource "databricks_group" "this" {
  for_each = local.groups
  provider = databricks.account

  display_name = "${var.name}-${each.key}"
}

# Jobs run as this identity. It has no secret: only the scheduler of Databricks acts as it.
resource "databricks_service_principal" "jobs" {
  provider = databricks.account

  display_name = "${var.name}-jobs"
}

resource "databricks_access_control_rule_set" "jobs" {
  provider = databricks.account

  name = local.rule_set

  grant_rules {
    principals = ["servicePrincipals/${var.deployer_client_id}"]
    role       = "roles/servicePrincipal.user"
  }
}

resource "databricks_mws_permission_assignment" "group" {
  for_each = databricks_group.this
  provider = databricks.account

  workspace_id = var.workspace_id
  principal_id = each.value.id
  permissions  = ["USER"]
}

resource "databricks_mws_permission_assignment" "jobs" {
  provider = databricks.account

  workspace_id = var.workspace_id
  principal_id = databricks_service_principal.jobs.id
  permissions  = ["USER"]
}

resource "databricks_entitlements" "group" {
  for_each = local.groups
  provider = databricks.workspace

  group_id                   = databricks_group.this[each.key].id
  allow_cluster_create       = false
  allow_instance_pool_create = false
  workspace_access           = each.value.workspace
  databricks_sql_access      = each.value.sql

  # The workspace knows a group of the account only once it is assigned.
  depends_on = [databricks_mws_permission_assignment.group]
}

resource "databricks_entitlements" "jobs" {
  provider = databricks.workspace

  service_principal_id       = databricks_service_principal.jobs.id
  allow_cluster_create       = false
  allow_instance_pool_create = false
  workspace_access           = true
  databricks_sql_access      = true

  depends_on = [databricks_mws_permission_assignment.jobs]
}
