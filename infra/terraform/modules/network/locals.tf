locals {
  # Two subnets of a quarter each for the clusters, because a Databricks node takes one address in both. A /20 then
  # holds 1,019 nodes. The last quarter is left for what comes later.
  host_prefix      = cidrsubnet(var.address_space, 2, 0)
  container_prefix = cidrsubnet(var.address_space, 2, 1)
  endpoint_prefix  = cidrsubnet(var.address_space, 4, 8)

  cluster_subnets = {
    host      = local.host_prefix
    container = local.container_prefix
  }

  # Delta tables are read over dfs; some clients list over blob.
  private_services = toset(["blob", "dfs"])
}
