locals {
  runtimes = {
    cpu = var.cpu_runtime
    gpu = var.gpu_runtime
  }

  # The policy fixes these; the provider wants to see them too where there are no workers.
  single_node_conf = {
    "spark.databricks.cluster.profile" = "singleNode"
    "spark.master"                     = "local[*]"
  }

  single_node_tags = {
    ResourceClass = "SingleNode"
  }

  # The clusters of the probes: one node with a GPU from the pool, and CPU nodes on spot.
  probes = {
    cpu = { policy = "cpu", pool = null, workers = [1], conf = {}, tags = {} }
    gpu = { policy = "single", pool = "gpu", workers = [], conf = local.single_node_conf, tags = local.single_node_tags }
  }

  # Not below /Shared, where every user could change what the jobs' service principal runs.
  probe_folder = "/${var.name}-probe"
}
