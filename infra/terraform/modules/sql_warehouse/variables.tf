variable "auto_stop_minutes" {
  type        = number
  description = "Minutes without a query after which the warehouse stops."
  nullable    = false

  validation {
    condition     = var.auto_stop_minutes >= 5 && var.auto_stop_minutes <= 120
    error_message = "auto_stop_minutes must be from 5 to 120. 0 would mean never, and a forgotten warehouse is the dearest part of many bills."
  }
}

variable "environment" {
  type        = string
  description = "Stage that the warehouse is tagged with."
  nullable    = false
}

variable "group_names" {
  type        = map(string)
  description = "Names of the groups engineers, operators and readers."
  nullable    = false
}

variable "jobs_application_id" {
  type        = string
  description = "Application id of the service principal that alerts and dashboards run as."
  nullable    = false
}

variable "max_clusters" {
  type        = number
  description = "Clusters that the warehouse may grow to."
  nullable    = false

  validation {
    condition     = var.max_clusters >= 1 && var.max_clusters <= 10
    error_message = "max_clusters must be from 1 to 10."
  }
}

variable "name" {
  type        = string
  description = "Prefix of the warehouse's name, for example raypipe-sit."
  nullable    = false
}

variable "serverless" {
  type        = bool
  description = "Whether the warehouse runs in Databricks' network. It then starts in seconds."
  nullable    = false
}

variable "size" {
  type        = string
  description = "Size of one cluster of the warehouse."
  nullable    = false

  validation {
    condition     = contains(["2X-Small", "X-Small", "Small", "Medium", "Large"], var.size)
    error_message = "size must be 2X-Small, X-Small, Small, Medium or Large."
  }
}
