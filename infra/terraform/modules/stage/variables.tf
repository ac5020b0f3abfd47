variable "address_space" {
  type        = string
  description = "IPv4 range of the stage's network, /16 to /22."
  nullable    = false
}

variable "alert_emails" {
  type        = list(string)
  description = "Who hears of the budget."
  nullable    = false
}

variable "budget_amount" {
  type        = number
  description = "Money a month, in the subscription's currency."
  nullable    = false
}

variable "budget_start" {
  type        = string
  description = "First day that the budget counts, the first of a month, as 2026-12-01."
  nullable    = false
}

variable "databricks_account_id" {
  type        = string
  description = "Id of the Databricks account."
  nullable    = false
}

variable "deployer_client_id" {
  type        = string
  description = "Client id of the identity that deploys the bundle."
  nullable    = false
}

variable "environment" {
  type        = string
  description = "Name of the stage."
  nullable    = false

  validation {
    condition     = contains(["sit", "uat", "prod"], var.environment)
    error_message = "environment must be sit, uat or prod."
  }
}

variable "location" {
  type        = string
  description = "Azure region of all resources."
  nullable    = false
}

variable "metastore_id" {
  type        = string
  description = "Id of the region's Unity Catalog metastore."
  nullable    = false
}

variable "project" {
  type        = string
  description = "First part of every name."
  nullable    = false
}

variable "settings" {
  type = object({
    # Caps: README, "The cost cap"
    max_dbu_per_hour  = number
    max_workers       = number
    daily_quota_gb    = number
    auto_stop_minutes = number
    max_sql_clusters  = number
    sql_size          = string

    # What is kept
    replication    = string
    restore_days   = number
    log_days       = number
    retention_days = number

    # Compute
    interactive    = bool
    serverless     = bool
    gpu_runtime    = string
    cpu_runtime    = string
    gpu_node_types = list(string)
    cpu_node_types = list(string)
    pools = map(object({
      node_type    = string
      max_capacity = number
      idle_minutes = optional(number, 15)
      min_idle     = optional(number, 0)
      spot         = optional(bool, false)
      preload      = string
    }))
  })
  description = "In what the stages differ: caps, retention and sizes. Each module validates its part."
  nullable    = false
}

variable "storage_suffix" {
  type        = string
  description = "Makes the storage account's name unique in all of Azure."
  nullable    = false
}

variable "subscription_id" {
  type        = string
  description = "Id of the subscription that everything is made in."
  nullable    = false
}
