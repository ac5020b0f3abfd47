# The real thing: copies in three buildings, a year of records, no cluster for people.
locals {
  environment   = "prod"
  address_space = "10.42.0.0/20" # the stages' ranges do not overlap, so that they can be peered

  settings = {
    max_dbu_per_hour  = 120
    max_workers       = 4
    daily_quota_gb    = 5
    auto_stop_minutes = 15
    max_sql_clusters  = 2
    sql_size          = "X-Small"

    replication    = "ZRS"
    restore_days   = 30
    log_days       = 90
    retention_days = 365

    interactive = false
    serverless  = true
    gpu_runtime = "17.3.x-gpu-ml-scala2.13"
    cpu_runtime = "17.3.x-cpu-ml-scala2.13"

    gpu_node_types = ["Standard_NC96ads_A100_v4", "Standard_NC48ads_A100_v4", "Standard_NC24ads_A100_v4", "Standard_NC4as_T4_v3"]
    cpu_node_types = ["Standard_E8ds_v5", "Standard_E16ds_v5"]

    pools = {
      gpu = {
        node_type    = "Standard_NC4as_T4_v3"
        max_capacity = 4
        preload      = "gpu"
      }
    }
  }
}
