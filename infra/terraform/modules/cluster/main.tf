# Pools make the second job of an hour start in a minute. GPUs of some sizes are scarce: an error CLOUD_PROVIDER_RESOURCE_STOCKOUT
# is Azure's, and min_idle or another size is the way out.
resource "databricks_instance_pool" "this" {
  for_each = var.pools

  instance_pool_name                    = "${var.name}-${each.key}"
  node_type_id                          = each.value.node_type
  min_idle_instances                    = each.value.min_idle
  max_capacity                          = each.value.max_capacity
  idle_instance_autotermination_minutes = each.value.idle_minutes
  preloaded_spark_versions              = [local.runtimes[each.value.preload]]

  azure_attributes {
    availability = each.value.spot ? "SPOT_AZURE" : "ON_DEMAND_AZURE"
  }

  custom_tags = {
    project = "raypipe"
    stage   = var.environment
  }
}

resource "databricks_permissions" "pool" {
  for_each = databricks_instance_pool.this

  instance_pool_id = each.value.id

  access_control {
    service_principal_name = var.jobs_application_id
    permission_level       = "CAN_ATTACH_TO"
  }

  access_control {
    group_name       = var.user_group_name
    permission_level = "CAN_ATTACH_TO"
  }
}

resource "databricks_cluster" "interactive" {
  count = var.interactive ? 1 : 0

  cluster_name            = "${var.name}-interactive"
  policy_id               = var.policy_ids["interactive"]
  spark_version           = var.gpu_runtime
  instance_pool_id        = databricks_instance_pool.this["gpu"].id
  num_workers             = 0
  autotermination_minutes = 30
  data_security_mode      = "SINGLE_USER"
  single_user_name        = var.user_group_name # a group may own a dedicated cluster
  spark_conf              = local.single_node_conf
  custom_tags             = local.single_node_tags

  # Everything else that the policy fixes: no GPU for Spark, tags, environment.
  apply_policy_default_values = true
}

resource "databricks_permissions" "interactive" {
  count = var.interactive ? 1 : 0

  cluster_id = databricks_cluster.interactive[0].id

  access_control {
    group_name       = var.user_group_name
    permission_level = "CAN_RESTART"
  }
}

# The job clusters themselves stand in the bundle beside their jobs. These two small jobs say whether policy, pool, quota
# and runtime give a cluster at all, before a training finds out at night.
resource "databricks_directory" "probe" {
  path = local.probe_folder
}

resource "databricks_permissions" "probe" {
  directory_path = databricks_directory.probe.path

  access_control {
    service_principal_name = var.jobs_application_id
    permission_level       = "CAN_READ"
  }
}

resource "databricks_workspace_file" "probe" {
  path   = "${databricks_directory.probe.path}/probe.py"
  source = "${path.module}/probe.py"
}

resource "databricks_job" "probe" {
  for_each = local.probes

  name                = "${var.name}-probe-${each.key}"
  description         = "Starts one job cluster as the jobs of raypipe do, and prints what it has"
  max_concurrent_runs = 1
  timeout_seconds     = 3600

  job_cluster {
    job_cluster_key = each.key

    new_cluster {
      policy_id                   = var.policy_ids[each.value.policy]
      spark_version               = local.runtimes[each.key]
      instance_pool_id            = each.value.pool == null ? null : databricks_instance_pool.this[each.value.pool].id
      num_workers                 = length(each.value.workers) == 0 ? 0 : null
      spark_conf                  = each.value.conf
      custom_tags                 = each.value.tags
      data_security_mode          = "SINGLE_USER"
      apply_policy_default_values = true

      dynamic "autoscale" {
        for_each = each.value.workers

        content {
          min_workers = autoscale.value
          max_workers = autoscale.value
        }
      }
    }
  }

  task {
    task_key        = "probe"
    job_cluster_key = each.key
    timeout_seconds = 1800

    spark_python_task {
      python_file = databricks_workspace_file.probe.path
      parameters  = [each.key]
    }
  }

  run_as {
    service_principal_name = var.jobs_application_id
  }

  depends_on = [databricks_permissions.probe]

  tags = {
    project = "raypipe"
    stage   = var.environment
  }
}
