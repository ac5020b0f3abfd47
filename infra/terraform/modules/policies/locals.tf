locals {
  common = {
    "spark_version"                                             = { type = "allowlist", values = var.runtimes, defaultValue = var.runtimes[0] }
    "data_security_mode"                                        = { type = "fixed", value = "SINGLE_USER", hidden = true } # Ray on Spark needs it
    "dbus_per_hour"                                             = { type = "range", maxValue = var.max_dbu_per_hour }
    "custom_tags.project"                                       = { type = "fixed", value = "raypipe" } # spend queries count by this tag
    "custom_tags.stage"                                         = { type = "fixed", value = var.environment }
    "spark_env_vars.RAY_AUTH_MODE"                              = { type = "fixed", value = "token", hidden = true }
    "spark_env_vars.RAY_USAGE_STATS_ENABLED"                    = { type = "fixed", value = "0", hidden = true }
    "spark_env_vars.DATABRICKS_DEFAULT_SERVICE_CREDENTIAL_NAME" = { type = "fixed", value = var.telemetry_credential_name, hidden = true }
  }

  # Ray owns the GPUs: a Spark task that claims one leaves none to Ray's workers.
  ray_owns_gpus = {
    "spark_conf.spark.task.resource.gpu.amount" = { type = "fixed", value = "0", hidden = true }
  }

  single_node = {
    "num_workers"                                 = { type = "fixed", value = 0, hidden = true }
    "spark_conf.spark.databricks.cluster.profile" = { type = "fixed", value = "singleNode", hidden = true }
    "spark_conf.spark.master"                     = { type = "fixed", value = "local[*]", hidden = true }
    "custom_tags.ResourceClass"                   = { type = "fixed", value = "SingleNode" }
  }

  # A spot node that is taken away costs a training its last minutes, and a batch only one piece: so spot for CPU work.
  # The pool would bring its own availability, and Databricks refuses both.
  spot = {
    "azure_attributes.availability"    = { type = "fixed", value = "SPOT_WITH_FALLBACK_AZURE" }
    "azure_attributes.first_on_demand" = { type = "fixed", value = 1 } # the driver stays
    "instance_pool_id"                 = { type = "forbidden" }
  }

  # A pool brings its own node type, so a node type is asked for only where no pool is named.
  gpu_nodes = {
    "node_type_id" = { type = "allowlist", values = var.gpu_node_types, defaultValue = var.gpu_node_types[0], isOptional = true }
  }

  cpu_nodes = {
    "node_type_id" = { type = "allowlist", values = var.cpu_node_types, defaultValue = var.cpu_node_types[0] }
  }

  definitions = {
    # Development: one node for people, ends when nobody uses it.
    interactive = merge(local.common, local.single_node, local.ray_owns_gpus, local.gpu_nodes, {
      "cluster_type"            = { type = "fixed", value = "all-purpose" }
      "autotermination_minutes" = { type = "range", minValue = 10, maxValue = 60, defaultValue = 30 }
    })

    # Training, search and drift checks on one node. One node with many GPUs comes before many nodes.
    single = merge(local.common, local.single_node, local.ray_owns_gpus, local.gpu_nodes, {
      "cluster_type" = { type = "fixed", value = "job" }
    })

    # Training and search where one node is not enough.
    gpu = merge(local.common, local.ray_owns_gpus, local.gpu_nodes, {
      "cluster_type" = { type = "fixed", value = "job" }
      "num_workers"  = { type = "range", minValue = 1, maxValue = var.max_workers, defaultValue = 1 }
    })

    # Ingest, clean, export.
    cpu = merge(local.common, local.spot, local.cpu_nodes, {
      "cluster_type"          = { type = "fixed", value = "job" }
      "autoscale.min_workers" = { type = "fixed", value = 1 }
      "autoscale.max_workers" = { type = "range", minValue = 1, maxValue = var.max_workers, defaultValue = 1 }
    })
  }
}
