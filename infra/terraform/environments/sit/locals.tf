# A sandbox: one small GPU node, a sample of the data, nothing kept for long.
locals {
  environment   = "sit"
  address_space = "10.40.0.0/20" # the stages' ranges do not overlap, so that they can be peered

  settings = {
    max_dbu_per_hour  = 10
    max_workers       = 1
    daily_quota_gb    = 1
    auto_stop_minutes = 10
    max_sql_clusters  = 1
    sql_size          = "2X-Small"

    replication    = "LRS"
    restore_days   = 7
    log_days       = 14
    retention_days = 30

    interactive = true
    serverless  = false
    gpu_runtime = "17.3.x-gpu-ml-scala2.13"
    cpu_runtime = "17.3.x-cpu-ml-scala2.13"

    gpu_node_types = ["Standard_NC4as_T4_v3"]
    cpu_node_types = ["Standard_E8ds_v5", "Standard_E16ds_v5"]

    pools = {
      gpu = {
        node_type    = "Standard_NC4as_T4_v3"
        max_capacity = 2
        preload      = "gpu"
      }
    }
  }
}
