resource "databricks_sql_endpoint" "this" {
  name                      = "${var.name}-sql"
  cluster_size              = var.size
  min_num_clusters          = 1
  max_num_clusters          = var.max_clusters
  auto_stop_mins            = var.auto_stop_minutes
  warehouse_type            = "PRO" # dashboards and alerts over Unity Catalog
  enable_serverless_compute = var.serverless

  tags {
    dynamic "custom_tags" {
      for_each = local.tags

      content {
        key   = custom_tags.key
        value = custom_tags.value
      }
    }
  }
}

resource "databricks_permissions" "this" {
  sql_endpoint_id = databricks_sql_endpoint.this.id

  access_control {
    service_principal_name = var.jobs_application_id
    permission_level       = "CAN_USE"
  }

  dynamic "access_control" {
    for_each = var.group_names

    content {
      group_name       = access_control.value
      permission_level = access_control.key == "operators" ? "CAN_MANAGE" : "CAN_USE"
    }
  }
}
