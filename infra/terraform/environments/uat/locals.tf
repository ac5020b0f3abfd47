# A rehearsal of prod with all of its data: the same kinds of nodes, fewer of them.
locals {
  environment   = "uat"
  address_space = "10.41.0.0/20" # the stages' ranges do not overlap, so that they can be peered

  settings = {
    max_dbu_per_hour  = 60
    max_workers       = 2
    daily_quota_gb    = 2
    auto_stop_minutes = 10
    max_sql_clusters  = 1
    sql_size          = "2X-Small"

    replication    = "ZRS"
    restore_days   = 14
    log_days       = 30
    retention_days = 60

    interactive = false
    serverless  = true
    gpu_runtime = "17.3.x-gpu-ml-scala2.13"
    cpu_runtime = "17.3.x-cpu-ml-scala2.13"

    gpu_node_types = ["Standard_NC48ads_A100_v4", "Standard_NC24ads_A100_v4", "Standard_NC4as_T4_v3"]
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
