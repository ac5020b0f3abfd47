variable "account_name" {
  type        = string
  description = "Name of the storage account, unique in all of Azure."
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9]{3,24}$", var.account_name))
    error_message = "account_name must be 3 to 24 lower-case letters and digits."
  }
}

variable "endpoint_subnet_id" {
  type        = string
  description = "Id of the subnet that gets the private endpoints."
  nullable    = false
}

variable "location" {
  type        = string
  description = "Azure region of all resources."
  nullable    = false
}

variable "log_days" {
  type        = number
  description = "Days until a blob of the container logs is deleted."
  nullable    = false

  validation {
    condition     = var.log_days >= 7 && var.log_days <= 3650 && floor(var.log_days) == var.log_days
    error_message = "log_days must be a whole number from 7 to 3650."
  }
}

variable "name" {
  type        = string
  description = "Prefix of the private endpoints' names, for example raypipe-sit."
  nullable    = false
}

variable "private_dns_zone_ids" {
  type        = map(string)
  description = "Id of the private DNS zone of each storage service that gets a private endpoint (blob, dfs)."
  nullable    = false

  validation {
    condition     = length(setsubtract(["blob", "dfs"], keys(var.private_dns_zone_ids))) == 0
    error_message = "private_dns_zone_ids must have the keys blob and dfs."
  }
}

variable "replication" {
  type        = string
  description = "Copies of the data: LRS (one building), ZRS (three), GZRS (three and another region)."
  nullable    = false

  validation {
    condition     = contains(["LRS", "ZRS", "GZRS"], var.replication)
    error_message = "replication must be LRS, ZRS or GZRS."
  }
}

variable "resource_group_name" {
  type        = string
  description = "Resource group that the account is made in."
  nullable    = false
}

variable "restore_days" {
  type        = number
  description = "Days in which a deleted blob or container can be restored."
  nullable    = false

  validation {
    condition     = var.restore_days >= 7 && var.restore_days <= 365 && floor(var.restore_days) == var.restore_days
    error_message = "restore_days must be a whole number from 7 to 365."
  }
}

variable "tags" {
  type        = map(string)
  description = "Tags of every resource."
  nullable    = false
}
