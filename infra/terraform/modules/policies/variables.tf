variable "cpu_node_types" {
  type        = list(string)
  description = "CPU node types that a cluster may have. The first one is proposed."
  nullable    = false

  validation {
    condition     = length(var.cpu_node_types) > 0 && alltrue([for node in var.cpu_node_types : can(regex("^Standard_[A-Za-z0-9_]+$", node))])
    error_message = "cpu_node_types must be at least one Azure size such as Standard_E8ds_v5."
  }
}

variable "environment" {
  type        = string
  description = "Stage that every cluster is tagged with."
  nullable    = false
}

variable "gpu_node_types" {
  type        = list(string)
  description = "GPU node types that a cluster may have. The first one is proposed; put several-GPU nodes before smaller ones."
  nullable    = false

  validation {
    condition     = length(var.gpu_node_types) > 0 && alltrue([for node in var.gpu_node_types : can(regex("^Standard_N[A-Za-z0-9_]+$", node))])
    error_message = "gpu_node_types must be at least one Azure GPU size such as Standard_NC24ads_A100_v4."
  }
}

variable "jobs_application_id" {
  type        = string
  description = "Application id of the service principal that jobs run as."
  nullable    = false
}

variable "max_dbu_per_hour" {
  type        = number
  description = "DBUs an hour that one cluster may take: the cap of its price."
  nullable    = false

  validation {
    condition     = var.max_dbu_per_hour > 0 && var.max_dbu_per_hour <= 1000
    error_message = "max_dbu_per_hour must be above 0 and at most 1000."
  }
}

variable "max_workers" {
  type        = number
  description = "Workers that a cluster may have beside its driver."
  nullable    = false

  validation {
    condition     = var.max_workers >= 1 && var.max_workers <= 64 && floor(var.max_workers) == var.max_workers
    error_message = "max_workers must be a whole number from 1 to 64."
  }
}

variable "name" {
  type        = string
  description = "Prefix of the policies' names, for example raypipe-sit."
  nullable    = false
}

variable "runtimes" {
  type        = list(string)
  description = "Databricks runtimes that a cluster may have. The first one is proposed."
  nullable    = false

  validation {
    condition     = length(var.runtimes) > 0 && alltrue([for runtime in var.runtimes : can(regex("^\\d+\\.\\d+\\.x-(cpu|gpu)-ml-scala2\\.1[23]$", runtime))])
    error_message = "runtimes must be at least one Databricks Runtime ML such as 17.3.x-gpu-ml-scala2.13."
  }
}

variable "telemetry_credential_name" {
  type        = string
  description = "Service credential that a cluster sends records to Azure Monitor with."
  nullable    = false
}

variable "user_group_name" {
  type        = string
  description = "Group that may start clusters by these policies."
  nullable    = false
}
