variable "cpu_runtime" {
  type        = string
  description = "Databricks Runtime ML of CPU clusters."
  nullable    = false
}

variable "environment" {
  type        = string
  description = "Stage that every node is tagged with."
  nullable    = false
}

variable "gpu_runtime" {
  type        = string
  description = "Databricks Runtime ML of GPU clusters."
  nullable    = false
}

variable "interactive" {
  type        = bool
  description = "Whether there is a cluster for people. Only where people develop."
  nullable    = false
}

variable "jobs_application_id" {
  type        = string
  description = "Application id of the service principal that jobs run as."
  nullable    = false
}

variable "name" {
  type        = string
  description = "Prefix of pools, cluster and jobs, for example raypipe-sit."
  nullable    = false
}

variable "policy_ids" {
  type        = map(string)
  description = "Id of each cluster policy: interactive, single, gpu, cpu."
  nullable    = false

  validation {
    condition     = length(setsubtract(["interactive", "single", "gpu", "cpu"], keys(var.policy_ids))) == 0
    error_message = "policy_ids must have the keys interactive, single, gpu and cpu."
  }
}

variable "pools" {
  type = map(object({
    node_type    = string
    max_capacity = number
    idle_minutes = optional(number, 15)
    min_idle     = optional(number, 0)
    spot         = optional(bool, false)
    preload      = string
  }))
  description = "Pools of nodes, by name; gpu is the one that single nodes come from. preload is the runtime that idle nodes already hold, cpu or gpu."
  nullable    = false

  validation {
    condition     = contains(keys(var.pools), "gpu")
    error_message = "pools must have the key gpu."
  }

  validation {
    condition     = alltrue([for pool in values(var.pools) : pool.max_capacity >= 1 && pool.min_idle >= 0 && pool.min_idle <= pool.max_capacity])
    error_message = "A pool needs max_capacity of at least 1 and min_idle from 0 to max_capacity: idle nodes cost money all night."
  }

  validation {
    condition     = alltrue([for pool in values(var.pools) : contains(["cpu", "gpu"], pool.preload)])
    error_message = "preload must be cpu or gpu."
  }
}

variable "user_group_name" {
  type        = string
  description = "Group that may use pools and the interactive cluster."
  nullable    = false
}
