variable "alert_emails" {
  type        = list(string)
  description = "Who hears of the budget."
  nullable    = false
}

variable "budget_amount" {
  type        = number
  description = "Money a month, in the subscription's currency. Mails go out at half of it, at 80 %, and when the forecast passes it."
  nullable    = false
}

variable "budget_start" {
  type        = string
  description = "First day that the budget counts, the first of a month, as 2026-12-01. Azure refuses a month that is over."
  nullable    = false
}

variable "databricks_account_host" {
  type        = string
  description = "Address of the Databricks account console of your cloud, with https://."
  nullable    = false

  validation {
    condition     = can(regex("^https://accounts\\.", var.databricks_account_host))
    error_message = "databricks_account_host must be the account console's address, https://accounts.…, not a workspace's."
  }
}

variable "databricks_account_id" {
  type        = string
  description = "Id of the Databricks account, from the account console."
  nullable    = false

  validation {
    condition     = can(regex("^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", var.databricks_account_id))
    error_message = "databricks_account_id must be a UUID in lower case."
  }
}

variable "deployer_client_id" {
  type        = string
  description = "Client id of the identity that CI deploys this stage with. An output of bootstrap."
  nullable    = false

  validation {
    condition     = can(regex("^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", var.deployer_client_id))
    error_message = "deployer_client_id must be a UUID in lower case."
  }
}

variable "location" {
  type        = string
  description = "Azure region of all resources, as westeurope. It must be the metastore's."
  nullable    = false

  validation {
    condition     = can(regex("^[a-z]+[0-9]?$", var.location))
    error_message = "location must be a region's short name, lower-case letters and a digit, as westeurope."
  }
}

variable "metastore_id" {
  type        = string
  description = "Id of the region's Unity Catalog metastore, from the account console."
  nullable    = false

  validation {
    condition     = can(regex("^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", var.metastore_id))
    error_message = "metastore_id must be a UUID in lower case."
  }
}

variable "project" {
  type        = string
  description = "First part of every name."
  default     = "raypipe"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9]{1,9}$", var.project))
    error_message = "project must be 2 to 10 lower-case letters and digits, letter first: it is a part of the storage account's name."
  }
}

variable "storage_suffix" {
  type        = string
  description = "Makes the storage account's name unique in all of Azure: 3 to 8 lower-case letters and digits of your choice."
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9]{3,8}$", var.storage_suffix))
    error_message = "storage_suffix must be 3 to 8 lower-case letters and digits."
  }
}

variable "subscription_id" {
  type        = string
  description = "Id of the subscription that everything is made in."
  nullable    = false

  validation {
    condition     = can(regex("^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", var.subscription_id))
    error_message = "subscription_id must be a UUID in lower case."
  }
}
